"""Record: a benchmark run with what it ran on, printed as a table of ratios and kept as JSON in docs/results.

Example: ``python -m flashgen bench --preset cpu --record docs/results/cpu.json``.
"""

from __future__ import annotations

import json
import math
import platform
import subprocess
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import target as targets
from .cases import Case
from .measure import measure, speedup

TOKENS = 16384  # of a GPU case, so that short sequences fill the machine too
HIDDEN = 2048  # heads * head_dim of a GPU case
PACKAGES = ("torch", "cupy-cuda13x", "cupy-cuda12x", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "sympy", "jinja2")


def presets() -> dict[str, list[tuple[Case, str]]]:
    """Named lists of (case, what to time)."""
    cpu = [
        (Case(1, 8, 8, 2048, dim, dtype, variant), what)
        for dtype in ("float32", "bfloat16")
        for what in ("forward", "both")
        for dim in (64, 128)
        for variant in ("full", "causal", *(("softcap",) if what == "forward" else ()))
    ]
    gpu = [
        (Case(TOKENS // n, HIDDEN // dim, HIDDEN // dim, n, dim, "bfloat16", variant), what)
        for what in ("forward", "backward")
        for dim in (64, 128, 256)
        for n in (512, 1024, 2048, 4096, 8192, 16384)
        for variant in ("full", "causal")
    ]
    passes = ("forward", "backward")
    scores: dict[str, tuple[str, ...]] = {"forward": ("full", "causal", "softcap", "alibi", "polynomial", "table", "window")}
    scores["backward"] = (*scores["forward"], "learned_table")
    variants = [(Case(2, 16, 16, 8192, 128, "bfloat16", variant), what) for what in passes for variant in scores[what]]
    masks = ("causal", "window", "document", "prefix", "chunked", "dilated", "sink_window", "blocks")
    sparse = [(Case(1, 16, 16, TOKENS, 128, "bfloat16", variant), what) for what in passes for variant in masks]
    shapes = [
        (Case(2, heads, kv_heads, 8192, dim, dtype, variant), what)
        for what in passes
        for heads, kv_heads, dim, dtype in (
            (32, 8, 128, "bfloat16"), (16, 16, 128, "float16"), (32, 32, 64, "bfloat16"), (25, 25, 80, "bfloat16"), (21, 21, 96, "bfloat16"),
            (16, 16, 128, "bfloat16"), (10, 10, 192, "bfloat16"), (8, 8, 256, "bfloat16"),
        )
        for variant in ("full", "causal")
    ]  # fmt: skip
    tuning = [  # 40 problems to tune
        *((n, dim, "bfloat16", variant, 1) for dim in (64, 128, 256) for n in (512, 2048, 8192) for variant in ("full", "causal")),
        *((8192, 128, "bfloat16", variant, 1) for variant in (*scores["forward"][2:], "document", "sink_window", "chunked")),
        *((4096, 64, "bfloat16", variant, 1) for variant in ("softcap", "alibi", "window", "document")),
        *((4096, dim, "bfloat16", variant, 1) for dim in (80, 96, 192) for variant in ("full", "causal")),
        (4096, 128, "float16", "causal", 1), (4096, 64, "float16", "full", 1), (8192, 128, "bfloat16", "causal", 4), (TOKENS, 128, "bfloat16", "causal", 1),
    ]  # fmt: skip
    problems = [
        (Case(TOKENS // n, heads, heads // group, n, dim, dtype, variant), what)
        for n, dim, dtype, variant, group in tuning
        for heads in (HIDDEN // dim // group * group,)
        for what in passes
    ]
    return {"gpu-tuning": problems, "cpu": cpu, "gpu": gpu, "gpu-variants": variants, "gpu-sparse": sparse, "gpu-shapes": shapes}


def environment(device: str) -> dict[str, Any]:
    """Versions, the machine, and the git trees that are measured."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found: dict[str, Any] = {"versions": versions, "python": platform.python_version()}
    if device == "cuda":
        found |= {"device": torch.cuda.get_device_name(), "driver": _driver()}
    else:
        chip = targets.detect_cpu()
        found |= {"device": chip.chip, "amx": "amx_bf16" in chip.features, "threads": torch.get_num_threads()}
    chip = targets.detect(torch.cuda.current_device()) if device == "cuda" else targets.detect_cpu()
    roof = {"chip": chip.chip, "tflops": {"bfloat16": chip.tensor_tflops, "float16": chip.tensor_tflops}, "gbs": chip.hbm_gbs}
    return found | {"roof": roof, "trees": trees()}


def trees() -> dict[str, str]:
    """Git tree ids of flashgen/ and templates/; "with changes" when the working tree differs from them."""
    root = Path(__file__).resolve().parents[2]
    git = lambda *args: subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=False)  # noqa: E731
    found = {}
    for folder in ("flashgen", "templates"):
        head = git("rev-parse", f"HEAD:{folder}")
        dirty = git("status", "--porcelain", "--", folder).stdout.strip()
        found[folder] = head.stdout.strip() + (" with changes" if dirty else "") if head.returncode == 0 else "not a git checkout"
    return found


def _driver() -> str:
    query = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False)
    return query.stdout.strip().splitlines()[0] if query.returncode == 0 and query.stdout.strip() else "unknown"


def run(
    cases: Iterable[tuple[Case, str]], device: str, *, rounds: int = 3, family: str | None = None, only: Sequence[str] = (), path: Path | None = None
) -> dict[str, Any]:  # fmt: skip
    """Measure every case, printing a line each; the rows come with the environment and a summary. path: where to keep them, see ``Kept``."""
    kept = Kept(path)
    result: dict[str, Any] = {"environment": environment(device), "family": family, "rows": [], "summary": {}}
    for case, what in cases:
        result["rows"].append(measure(case, device, what, rounds=rounds, family=family, only=only))
        result["summary"] = summary(result["rows"])
        print(line(result["rows"][-1]), flush=True)
        kept.save(result)
    kept.finish()
    return result


def line(row: dict[str, Any]) -> str:
    parts = [f"{row['case']:44s} {row['what']:8s} {row['ms']['flashgen']:9.3f} ms {row['tflops']['flashgen']:8.3f} TFLOP/s"]
    parts += [f"{name} {row['tflops'][name]:8.3f} ({speedup(row, name):.2f}x)" for name in row["ms"] if name != "flashgen"]
    if row["preparation"]:
        ms, size = row["preparation"]["ms"], row["preparation"]["bytes"]
        parts.append(f"preparing the mask {ms * 1e3:.1f} us, {size / 1024:.1f} KiB ({ms / row['ms']['flashgen']:.1%})")
    return "  ".join(parts + [f"{name}: {why}" for name, why in row["failed"].items()])


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Geometric mean and minimum of our speed over each peer's, per pass and dtype."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        for name in row["ms"]:
            if name != "flashgen":
                groups.setdefault(f"{row['what']} {row['case'].split()[4]} over {name}", []).append(speedup(row, name))
    return {k: {"geometric_mean": round(math.exp(sum(map(math.log, r)) / len(r)), 3), "min": round(min(r), 3), "cells": len(r)} for k, r in groups.items()}


class Kept:
    """A record while it grows: saved beside ``path`` after every case, and in its place when all are measured, so that an interrupted run loses neither its own
    cases nor an earlier record. path: None keeps nothing."""

    def __init__(self, path: Path | None):
        self._path = path
        self._part = path and path.with_name(f"{path.name}.part")

    def save(self, result: dict[str, Any]) -> None:
        if self._part is not None:
            self._part.parent.mkdir(parents=True, exist_ok=True)
            self._part.write_text(json.dumps(result, indent=1) + "\n")

    def finish(self) -> None:
        if self._path is not None and self._part is not None and self._part.is_file():
            self._part.replace(self._path)
