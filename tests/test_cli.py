"""Does the command line print what the library does, and are its errors one line?"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashgen
from flashgen import tune
from flashgen.__main__ import find_variant, main
from flashgen.tune import Effort

ROOT = Path(__file__).parent.parent


def run(capsys, *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def fail(capsys, *arguments: str) -> str:
    assert main(arguments) == 1
    streams = capsys.readouterr()
    assert streams.out == ""
    return streams.err


def test_emit_prints_the_kernels_source(capsys):
    text = run(capsys, "emit", "--variant", "Variant(mask=causal, score=softcap(30))", "--target", "sm80", "--head-dim", "128", "--kv-heads", "4")
    assert "fg::tanh" in text and "constexpr int GROUP = 4" in text and "constexpr int HEAD_DIM_QK = 128" in text


def test_emit_chooses_pass_dtype_and_dims(capsys):
    text = run(capsys, "emit", "--target", "cpu", "--dtype", "float64", "--head-dim", "64", "--head-dim-v", "32", "--which", "backward")
    assert "using T = double" in text and "constexpr int HEAD_DIM_V = 32" in text and "dout" in text


def test_a_mask_or_score_alone_is_a_variant_and_tensors_can_be_written(capsys):
    assert "kv_range" in run(capsys, "emit", "--variant", "causal & sliding_window(1023, 0)", "--target", "cpu")
    assert "capture_0" in run(capsys, "emit", "--variant", "relative_bias(torch.zeros(16, 33))", "--target", "cpu")
    assert "sink" in run(capsys, "emit", "--variant", "Variant(sink=True)", "--target", "cpu")


def test_a_variant_is_found_in_a_module(capsys, tmp_path, monkeypatch):
    (tmp_path / "my_variants.py").write_text(
        "import flashgen\nwindow = flashgen.Variant(head_dim=(96, 64), mask=flashgen.sliding_window(9, 9))\n"
        "def made():\n    return window\nkernel = flashgen.compile(window)\nnumber = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    for name in ("window", "made", "kernel"):
        assert find_variant(f"my_variants:{name}").head_dim == (96, 64)
    text = run(capsys, "emit", "--variant", "my_variants:window", "--target", "cpu")
    assert "HEAD_DIM_QK = 96" in text and "HEAD_DIM_V = 64" in text
    assert "not int" in fail(capsys, "emit", "--variant", "my_variants:number")
    assert "has no attribute 'other'" in fail(capsys, "emit", "--variant", "my_variants:other")


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
def test_a_standalone_file_compiles_with_nothing_else(capsys, tmp_path):
    path = tmp_path / "kernel.cpp"
    run(capsys, "emit", "--variant", "causal", "--target", "cpu", "--dtype", "float32", "--head-dim", "64", "--standalone", "-o", str(path))
    assert '#include "fg/' not in path.read_text()
    command = ["g++", "-std=c++17", "-O1", "-march=native", "-fopenmp", "-fPIC", "-shared", path, "-o", tmp_path / "kernel.so"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ctypes.CDLL(str(tmp_path / "kernel.so")).fg_forward


STANDALONE = {
    "sm80": ("--target", "sm80", "--which", "backward"),
    "sm90a": ("--target", "sm90a", "--variant", "relative_bias(torch.zeros(16, 33))"),
    "sm90": ("--target", "sm90a", "--family", "sm90", "--variant", "Variant(mask=causal, score=softcap(30))"),
}


@pytest.mark.parametrize("name", STANDALONE)
def test_a_standalone_file_for_a_gpu_compiles_with_nothing_else(capsys, name, tmp_path):
    options = STANDALONE[name]
    text = run(capsys, "emit", "--standalone", "--head-dim", "64", *options)
    assert '#include "fg/' not in text and "// ---- fg/base.h" in text
    arch = flashgen.target.parse(options[1]).arch
    if shutil.which("nvcc"):
        (tmp_path / "kernel.cu").write_text(text)
        done = subprocess.run(["nvcc", f"-arch={arch}", "-std=c++17", "-cubin", "kernel.cu"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    program = nvrtc.createProgram(text, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"-arch={arch}", "-std=c++17"))
        assert nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)


def test_explain_says_what_was_proved_and_what_binds(capsys):
    text = run(capsys, "explain", "--variant", "causal", "--target", "sm90a", "--length", "2048")
    assert "k <= q + kv_len - q_len" in text and "Roofline" in text and "2048" in text


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("fnord(3)", "'fnord' is not defined"),
        ("softcap(-1)", "a positive number is wanted"),
        ("causal and document", "a mask has no truth value"),
        ("no_such_module_here:x", "No module named"),
        ("3", "not int"),
    ],
)
def test_a_wrong_variant_is_one_line(capsys, variant, message):
    error = fail(capsys, "emit", "--variant", variant, "--target", "cpu")
    assert error.startswith("flashgen: ") and message in error and error.count("\n") == 1


def test_what_a_target_cannot_do_is_said(capsys):
    assert "head_dim" in fail(capsys, "emit", "--head-dim", "1024", "--target", "cpu")
    assert "not float64; sm80" in fail(capsys, "emit", "--dtype", "float64", "--target", "sm80")


def test_info_lists_versions_targets_compilers_and_the_cache_and_cleans_it(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path / "cache"))
    text = run(capsys, "info")
    assert flashgen.__version__ in text and "torch" in text and "sm90a" in text and "C++: " in text and str(tmp_path / "cache") in text and "0 kernels" in text
    assert not re.search(r"\d{12}", text.split("Compilers")[1].split("Targets")[0]), "a compiler is shown without its file's time"
    store = flashgen.cache.current()
    store.put_index("a" * 64, {"binary": "b"})
    assert "1 index entries" in run(capsys, "info")
    assert "Removed" in run(capsys, "info", "--clean")
    assert "0 index entries" in run(capsys, "info")


def test_tune_prints_its_tables_and_the_cache_tells_and_forgets_the_winners(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tune, "MOST_CANDIDATES", 2)
    monkeypatch.setattr(tune, "Effort", lambda: Effort(load=0.01, burst=0.001, pause=0.0, rounds=3, settling=0.01))
    shape = ("--dtype", "float32", "--head-dim", "16", "--heads", "2", "--length", "64")
    text = run(capsys, "tune", "--variant", "Variant(mask=causal, sink=True)", *shape, "--no-backward")
    assert "predicted ms" in text and "tiler's" in text and "forward: " in text and "backward" not in text
    held = run(capsys, "cache", "info")
    assert "1 tuned problems" in held and "tuned: forward, float32, head dims 16/16, short" in held and "block_q=" in held
    assert "(k <= q + kv_len - q_len; no score), on" in held and "not used" not in held
    assert "tuned: forward" in run(capsys, "info")
    (path,) = (tmp_path / "cache").rglob("*.jsonl")
    path.write_text(path.read_text().replace(flashgen.cache.package_digest(), "0" * 64))
    assert "(of another version, not used)" in run(capsys, "cache", "info")
    assert "1 tuned problems" not in run(capsys, "cache", "clean") and "1 tuned problems" in run(capsys, "cache", "info")
    assert "and 1 tuned problems" in run(capsys, "cache", "clean", "--tuning")
    held = run(capsys, "cache", "info")
    assert "0 kernels, 0 index entries, 0 tuned problems" in held


def test_tune_measures_a_preset_and_says_how_good_the_tiler_is(capsys, tmp_path, monkeypatch):
    from flashgen.bench import record
    from flashgen.bench.cases import Case

    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tune, "MOST_CANDIDATES", 2)
    monkeypatch.setattr(tune, "Effort", lambda: Effort(load=0.01, burst=0.001, pause=0.0, rounds=3, settling=0.01))
    monkeypatch.setattr(record, "presets", lambda: {"cpu": [(Case(1, 2, 2, 64, 16, "float32", "causal"), what) for what in ("forward", "both")]})
    text = run(capsys, "tune", "--preset", "cpu", "--json", str(tmp_path / "table.json"))
    assert text.count("tiler ") == 2 and "of the tuned best in" in text and "of 2 passes" in text
    table = json.loads((tmp_path / "table.json").read_text())
    assert [row["what"] for row in table["rows"]] == ["forward", "backward"] and all(row["ratio"] >= 1 for row in table["rows"])
    assert all(bool(row["changes"]) == (row["ratio"] > 1) and all(first != best for first, best in row["changes"].values()) for row in table["rows"])
    assert "the presets are" in fail(capsys, "tune", "--preset", "none")


def test_mask_is_printed_and_drawn(capsys, tmp_path):
    path = tmp_path / "mask.png"
    text = run(capsys, "mask", "--variant", "causal", "--length", "256", "--block", "64", "--plot", str(path))
    assert text.splitlines()[:4] == ["▒···", "█▒··", "██▒·", "███▒"]
    assert path.read_bytes().startswith(b"\x89PNG")


def test_explain_draws_the_predicted_bytes(capsys, tmp_path):
    path = tmp_path / "bytes.png"
    run(capsys, "explain", "--variant", "causal", "--target", "sm90a", "--length", "2048", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_trouble_of_the_users_files_is_one_line(capsys, tmp_path, monkeypatch):
    (tmp_path / "broken_variants.py").write_text("1 / 0\n")
    (tmp_path / "needy_variants.py").write_text("def made(length):\n    return length\n")
    monkeypatch.chdir(tmp_path)
    assert "ZeroDivisionError" in fail(capsys, "emit", "--variant", "broken_variants:x")
    assert "takes no argument" in fail(capsys, "emit", "--variant", "needy_variants:made")
    assert "Choose another path" in fail(capsys, "emit", "--output", str(tmp_path / "broken_variants.py" / "kernel.cu"))


def test_a_factory_without_its_parentheses_is_an_error(capsys):
    assert "call it, sliding_window(left, right)" in fail(capsys, "explain", "--variant", "sliding_window")
    assert "call it, Variant(head_dim, mask, score, scale, sink)" in fail(capsys, "emit", "--variant", "Variant")
    assert "write mask(...)" in fail(capsys, "mask", "--variant", "lambda b, h, q, k: k <= q")
    assert "k <= q (bounds" in run(capsys, "explain", "--variant", "mask(lambda b, h, q, k: k <= q)", "--target", "sm80")


def test_a_picture_of_any_length_makes_no_tensors(capsys):
    assert "█" in run(capsys, "mask", "--length", "2000000000")


def test_bench_prints_ratios_and_keeps_json_and_a_plot(capsys, tmp_path, monkeypatch):
    from flashgen.bench import measure, record
    from flashgen.bench.cases import Case

    monkeypatch.setattr(record, "presets", lambda: {"cpu": [(Case(1, 2, 2, 64, 16, "float32", "causal"), what) for what in ("forward", "both")]})
    monkeypatch.setitem(measure.TARGET_SECONDS, "cpu", 0.001)
    text = run(capsys, "bench", "--preset", "cpu", "--rounds", "1", "--json", str(tmp_path / "run.json"), "--plot", str(tmp_path / "run.png"))
    assert "sdpa" in text and "geometric mean" in text
    rows = json.loads((tmp_path / "run.json").read_text())["rows"]
    assert [row["what"] for row in rows] == ["forward", "both"] and all(set(row["ms"]) == {"flashgen", "sdpa"} and row["bytes"] > 0 for row in rows)
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_bench_that_is_interrupted_keeps_what_it_measured(tmp_path, monkeypatch):
    from flashgen.bench import record
    from flashgen.bench.cases import Case

    def measure(case, device, what, **_):
        if what == "both":
            raise KeyboardInterrupt
        times = {"flashgen": 1.0, "sdpa": 2.0}
        return {"case": case.name, "what": what, "ms": times, "tflops": times, "failed": {}, "preparation": {}}

    monkeypatch.setattr(record, "measure", measure)
    path = tmp_path / "run.json"
    path.write_text("an earlier record")
    with pytest.raises(KeyboardInterrupt):
        record.run([(Case(1, 2, 2, 64, 16, "float32", "causal"), what) for what in ("forward", "both")], "cpu", path=path)
    assert path.read_text() == "an earlier record"
    kept = json.loads((tmp_path / "run.json.part").read_text())
    assert [row["what"] for row in kept["rows"]] == ["forward"] and kept["summary"]["forward float32 over sdpa"]["min"] == 2.0


def test_bench_names_its_presets_and_needs_the_device_it_measures(capsys):
    assert "cpu" in fail(capsys, "bench", "--preset", "no such")
    if not torch.cuda.is_available():
        assert "there is none" in fail(capsys, "bench", "--preset", "gpu")


def test_what_cannot_be_written_or_is_unknown_is_said_before_anything_is_measured(capsys, tmp_path, monkeypatch):
    from flashgen.bench import record

    monkeypatch.setattr(record, "run", lambda *_, **__: pytest.fail("measured"))
    assert "sdpa_cudnn" in fail(capsys, "bench", "--preset", "cpu", "--peers", "sdpa,spda")
    assert "--preset" in fail(capsys, "tune", "--record", str(tmp_path / "table.json"))
    (tmp_path / "file").touch()
    assert "another path" in fail(capsys, "bench", "--preset", "cpu", "--plot", str(tmp_path / "file" / "run.png"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for command in (["bench", "--preset", "cpu"], ["explain"], ["mask", "--variant", "causal"]):
        assert "pip install matplotlib" in fail(capsys, *command, "--plot", str(tmp_path / "run.png"))


def test_an_interrupted_command_says_so(capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(flashgen, "autotune", interrupted)
    assert main(["tune", "--variant", "causal", "--length", "64", "--dtype", "float32"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_generated_needs_a_folder_and_a_choice(capsys, tmp_path):
    assert "is no folder" in fail(capsys, "generated", "--check", "--directory", str(tmp_path / "absent"))
    assert "Update with" in fail(capsys, "generated", "--check", "--directory", str(tmp_path))
    with pytest.raises(SystemExit) as stop:
        main(["generated"])
    assert stop.value.code == 2


def test_the_package_runs_as_a_module():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "flashgen", "emit", "--variant", "causal", "--target", "cpu"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "fg_forward" in done.stdout, done.stderr
