"""Does flashgen stand what happens to processes: many at once on an empty cache, a warm start, folders nobody can write, a fork, no CUDA headers?

Each child is a program of its own that checks a result and prints one line of JSON. What the cache does beneath is test_cache's subject.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FIRST_CALL_SECONDS = 4.0  # with an empty cache, beyond importing torch
WARM_CALL_SECONDS = 0.3
ALLOWANCE = 3.0  # times that, so that a busy machine fails nothing

pytestmark = pytest.mark.skipif(not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")

CHILD = """
import json, os, sys, time, warnings
import torch
warnings.simplefilter("always")
torch.set_num_threads(2)
started = time.perf_counter()
import flashgen
kernel = flashgen.compile(flashgen.Variant(mask=flashgen.causal, score=flashgen.softcap(20.0)))
def check(dim):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 65, dim, generator=g) for _ in range(3))
    out = kernel(q, k, v)
    s = 20 * torch.tanh(q @ k.mT * dim**-0.5 / 20)
    s = s.masked_fill(~torch.ones(65, 65, dtype=torch.bool).tril(), float("-inf"))
    assert (out - torch.softmax(s, -1) @ v).abs().max() < 1e-5
check(int(sys.argv[1]))
seconds = time.perf_counter() - started
print(json.dumps({"seconds": seconds, "heavy": sorted({"sympy", "jinja2", "cupy", "cupy_backends"} & set(sys.modules)), "file": flashgen.__file__}))
"""


def start(cache: Path | str | None, program: str = CHILD, dim: int = 64, **environment: str) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("FLASHGEN_")}
    wanted = {**inherited, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **environment}
    if cache is not None:
        wanted["FLASHGEN_CACHE"] = str(cache)
    return subprocess.Popen([sys.executable, "-c", program, str(dim)], env=wanted, cwd="/", text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(child: subprocess.Popen[str]) -> tuple[dict, str]:
    out, error = child.communicate(timeout=250)
    assert child.returncode == 0, out + error
    return json.loads(out.splitlines()[-1]), error


def entries(cache: Path, folder: str) -> list[Path]:
    return [path for path in (cache / folder).glob("*") if path.is_file()] if (cache / folder).is_dir() else []


@pytest.fixture(scope="module")
def warm(tmp_path_factory) -> Path:
    """A cache that one process has filled."""
    cache = tmp_path_factory.mktemp("processes") / "cache"
    cold, _ = finish(start(cache))
    print(f"first call, empty cache: {cold['seconds']:.2f} s beyond importing torch")
    assert cold["seconds"] < FIRST_CALL_SECONDS * ALLOWANCE
    return cache


def test_a_second_process_reloads_quickly_and_without_sympy_or_jinja2(warm):
    results = [finish(start(warm))[0] for _ in range(3)]
    seconds = min(result["seconds"] for result in results)
    print(f"first call, warm cache: {seconds:.3f} s beyond importing torch")
    assert [result["heavy"] for result in results] == [[], [], []]
    assert seconds < WARM_CALL_SECONDS * ALLOWANCE
    assert len(entries(warm, "object")) == 1, "nothing was compiled again"


def test_another_head_dim_adds_one_kernel(warm, tmp_path):
    cache = tmp_path / "cache"
    shutil.copytree(warm, cache)
    finish(start(cache, dim=48))
    assert len(entries(cache, "index")) == len(entries(cache, "object")) == 2
    again, _ = finish(start(cache, dim=48))
    assert again["heavy"] == []


@pytest.mark.slow
def test_eight_cold_processes_at_once_leave_one_complete_entry(tmp_path):
    cache = tmp_path / "cache"
    for child in [start(cache) for _ in range(8)]:
        finish(child)
    assert len(entries(cache, "index")) == len(entries(cache, "store")) == len(entries(cache, "object")) == 1
    assert not entries(cache, "tmp") and not entries(cache, "lock")
    result, _ = finish(start(cache))
    assert result["heavy"] == [], "the entry is complete"


@pytest.mark.parametrize("where", ["home", "cache"])
def test_folders_that_cannot_be_made_cost_one_warning(where, tmp_path):
    """A path below a file: nobody, not even root, can make a folder there."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    environment = {"HOME": str(blocked / "home"), "XDG_CACHE_HOME": str(blocked / "cache")} if where == "home" else {}
    private = tmp_path / "temporary"
    private.mkdir()
    _, error = finish(start(None if where == "home" else blocked / "cache", TMPDIR=str(private), **environment))
    assert error.count("flashgen cannot write its cache") == 1 and "FLASHGEN_CACHE" in error
    assert not list(private.glob("flashgen-*")), "the private folder goes with its process"


def test_a_damaged_cache_is_made_anew(warm, tmp_path):
    cache = tmp_path / "cache"
    shutil.copytree(warm, cache)
    for folder in ("index", "store", "object"):
        for path in entries(cache, folder):
            path.write_bytes(path.read_bytes()[:40])
    finish(start(cache))
    result, _ = finish(start(cache))
    assert result["heavy"] == [], "the repaired entry serves"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("before", ["import", "call"])
def test_a_forked_child_computes(before, warm):
    """``import``: everything loaded and compiled, nothing run, before the fork. ``call``: run with two threads before it; the child then uses one, as
    torch's DataLoader workers do, since OpenMP's threads do not survive a fork (torch's own operators hang likewise)."""
    program = f"""
import os
import torch
import flashgen
torch.set_num_threads(1)
kernel = flashgen.compile(flashgen.Variant(mask=flashgen.causal))
q = torch.randn(1, 2, 65, 64)
expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
kernel.build(q, q, q)
torch.set_num_threads(2)
if {before!r} == "call":
    kernel(q, q, q)
child = os.fork()
if child == 0:
    if {before!r} == "call":
        torch.set_num_threads(1)
    os._exit(0 if torch.allclose(kernel(q, q, q), expected, atol=1e-5) else 3)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert torch.allclose(kernel(q, q, q), expected, atol=1e-5)
print("{{}}")
"""
    finish(start(warm, program))


def test_cuda_source_compiles_without_cuda_headers(tmp_path):
    """NVRTC alone, no toolkit: the emitted source includes nothing else. Where NVRTC is missing the error names the package."""
    program = """
import json
import flashgen
kernel = flashgen.compile(flashgen.Variant(head_dim=64, mask=flashgen.causal), target="sm80")
try:
    binary = kernel.build()
    assert binary.kind == "cubin" and binary.report.entry("forward").registers > 0
except flashgen.CompileError as error:
    assert "pip install 'flashgen[cuda" in str(error), error
print(json.dumps({}))
"""
    hidden = {name: "" for name in ("CUDA_PATH", "CUDA_HOME", "CPATH", "CPLUS_INCLUDE_PATH")}
    finish(start(tmp_path / "cache", program, **hidden))


def test_a_cubin_is_never_offered_to_another_architecture(tmp_path):
    pytest.importorskip("cupy_backends")
    program = """
import json
import flashgen
for name in ("sm80", "sm90a", "sm80"):
    flashgen.compile(flashgen.Variant(head_dim=32, mask=flashgen.causal), target=name, family="sm80").build()
print(json.dumps({}))
"""
    cache = tmp_path / "cache"
    finish(start(cache, program))
    assert len(entries(cache, "index")) == len(entries(cache, "object")) == 2
