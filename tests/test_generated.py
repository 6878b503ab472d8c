"""Are the kernels kept in generated/ those that are emitted now, do they compile without spills, and do plan and compiler agree on them?"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashgen import generated
from flashgen.build import compiler_version
from flashgen.errors import CompileError
from flashgen.generated import DIRECTORY, GOLDENS, UPDATE, gpu_goldens, planned_smem, read_resources
from flashgen.target import CHIPS

ROOT = Path(__file__).parent.parent


def has_nvrtc() -> bool:
    try:
        return bool(compiler_version(CHIPS["sm80"]))
    except CompileError:
        return False


@pytest.mark.parametrize("golden", GOLDENS.values(), ids=GOLDENS)
def test_a_kept_kernel_is_what_is_emitted(golden):
    path = DIRECTORY / golden.file_name
    assert path.exists(), f"generated/{golden.file_name} is missing. Update with: {UPDATE}"
    assert path.read_text() == golden.source().text, f"generated/{golden.file_name} differs from what is emitted. If the change is meant: {UPDATE}"


def test_nothing_else_is_kept():
    kept = {path.name for path in DIRECTORY.iterdir()}
    assert kept - {golden.file_name for golden in GOLDENS.values()} == {generated.RESOURCES}


def test_the_text_does_not_depend_on_the_hash_seed():
    program = "from flashgen.generated import GOLDENS\nfor golden in GOLDENS.values(): print(golden.source().text)"

    def texts(seed: str) -> str:
        return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}).stdout

    assert texts("1") == texts("2")


def test_planned_shared_memory_is_as_recorded_and_fits():
    rows = read_resources()
    assert {row["kernel"] for row in rows} == {golden.name for golden in gpu_goldens()}
    for golden in gpu_goldens():
        planned = planned_smem(golden)
        recorded = {row["entry"]: int(row["planned_smem_bytes"]) for row in rows if row["kernel"] == golden.name}
        assert recorded == planned, f"{golden.name}. Update with: {UPDATE}"
        assert max(planned.values()) <= golden.target.smem_block_bytes


@pytest.mark.slow
@pytest.mark.skipif(not has_nvrtc(), reason="no NVRTC")
@pytest.mark.parametrize("golden", gpu_goldens(), ids=lambda golden: golden.name)
def test_gpu_kernels_compile_as_recorded(golden):
    """A kept kernel is what a call builds for its chip, and spills on no architecture that compiles it."""
    recorded = {(row["entry"], row["arch"]): row for row in read_resources() if row["kernel"] == golden.name}
    found = generated.resources(golden, 0)
    assert {(row["entry"], row["arch"]) for row in found} == set(recorded), f"Update with: {UPDATE}"
    for row in found:
        spilled = {key: row[key] for key in ("spill_stores", "spill_loads", "stack_bytes") if row[key] != "0"}
        assert not spilled, f"{golden.name}, {row['entry']} for {row['arch']}: {spilled}"
        was = recorded[row["entry"], row["arch"]]
        assert row["static_smem_bytes"] == was["static_smem_bytes"]
        # another NVRTC allocates differently; only a jump is a finding
        now, then = int(row["registers"]), int(was["registers"])
        assert abs(now - then) <= 32, f"{golden.name}, {row['entry']}: {now} registers, recorded {then}. Update with: {UPDATE}"


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
@pytest.mark.parametrize("golden", [g for g in GOLDENS.values() if g.target.kind == "cpu"], ids=lambda golden: golden.name)
def test_cpu_kernels_are_accepted_for_their_chip(golden, tmp_path):
    """Checked for syntax and types with the chip's own instruction sets, which this machine need not have."""
    source = golden.source()
    for name, text in ((source.file_name, source.text), *source.headers):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    chip = "-march=haswell" if golden.target is generated.DESKTOP else "-march=sapphirerapids"
    command = ["g++", "-std=c++17", chip, "-fopenmp", "-fsyntax-only", "-I.", source.file_name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    if "bad value" in done.stderr or "not supported" in done.stderr:
        pytest.skip(f"this g++ does not know {chip}")
    assert done.returncode == 0, done.stderr
