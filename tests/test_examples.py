"""Do the examples run as a user runs them, and do their own checks pass?"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run_example(name: str, *arguments: str) -> str:
    # the CPU, as on any machine; threads that wait do not spin, for one that is busy
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run([sys.executable, ROOT / "examples" / name, *arguments], capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_quickstart_agrees_with_eager_attention_and_explains_its_plan():
    out = run_example("quickstart.py")
    assert "All agree." in out and "OFF" not in out
    assert out.count(" ok") == 5, "out, dq, dk, dv and the learned bias"
    for section in ("Proved", "Plan", "Predicted", "first call"):
        assert section in out


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["causal", "window-alibi"])
def test_training_with_flashgen_follows_sdpa(variant, tmp_path):
    out = run_example("train_gpt.py", "--variant", variant, "--steps", "4", "--batch", "2", "--length", "160", "--device", "cpu", "--out", str(tmp_path))
    assert "flashgen" in out and "sdpa" in out and "tokens/s" in out
    report = json.loads((tmp_path / "losses.json").read_text())
    ours, theirs = (report["runs"][name]["losses"] for name in ("flashgen", "sdpa"))
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert ours[-1] < ours[0] - 0.3, "it learns"


def test_one_attention_alone_can_be_trained(tmp_path):
    run_example("train_gpt.py", "--attention", "flashgen", "--steps", "1", "--batch", "1", "--length", "16", "--device", "cpu", "--out", str(tmp_path))
    assert list(json.loads((tmp_path / "losses.json").read_text())["runs"]) == ["flashgen"]


def test_all_attentions_have_a_curve(tmp_path):
    pytest.importorskip("matplotlib")
    example = runpy.run_path(str(ROOT / "examples" / "train_gpt.py"), run_name="example")
    runs = {name: {"losses": [2.0, 1.0], "final": 1.0} for name in example["ATTENTIONS"]}
    assert example["plot"](runs, "all", tmp_path / "losses.png") and (tmp_path / "losses.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("custom_score.py", "largest error against float64"),
        ("window_softcap.py", "What bounds the tile"),
        ("documents.py", "packed sequences: largest error"),
        ("learned_bias.py", "the tables differ by 0.0"),
        ("hugging_face.py", "largest difference from eager"),
    ],
)
def test_short_examples_check_themselves(name, line):
    if name == "hugging_face.py":
        pytest.importorskip("transformers")
    assert line in run_example(name)


def test_every_example_is_listed_and_run():
    files = {path.name for path in (ROOT / "examples").glob("*.py")}
    listed = (ROOT / "examples" / "README.md").read_text()
    assert all(f"`{name}`" in listed for name in files)
    assert all(f'"{name}"' in Path(__file__).read_text() for name in files)
