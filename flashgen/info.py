"""Info: versions, devices, compilers, targets and the cache, as the commands ``info`` and ``cache`` print them."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata

import torch

import flashgen

from . import build, cache, records, settings
from . import target as targets
from .errors import CompileError, FlashgenError

PACKAGES = (
    "torch", "numpy", "sympy", "jinja2", "cupy-cuda13x", "cupy-cuda12x", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "cuda-bindings", "matplotlib",
    "transformers",
)  # fmt: skip


def info(options: argparse.Namespace) -> None:
    if options.clean:
        return clean(argparse.Namespace(tuning=False))
    print(f"flashgen {flashgen.__version__}, Python {sys.version.split()[0]}")
    for name in PACKAGES:
        try:
            print(f"  {name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    print("Devices")
    for line in _devices():
        print(f"  {line}")
    print("Compilers")
    for line in _compilers():
        print(f"  {line}")
    print("Targets")
    for chip in targets.CHIPS.values():
        print(f"  {chip.name:6} {chip.chip}: {chip.smem_block_bytes} bytes of shared memory per block, {chip.sms} SMs, {chip.status}")
    cache_info(options)


def cache_info(options: argparse.Namespace) -> None:
    """Where the cache lies, what it holds, and the newest winner of every tuning record."""
    held = cache.current().info()
    print(f"Cache (FLASHGEN_CACHE: {settings.cache() or 'not set'})")
    print(f"  {held['directory']}: {held['kernels']} kernels, {held['index']} index entries, {held['tuned']} tuned problems, {held['bytes'] / 1e6:.1f} MB")
    for line in _tuned():
        print(f"  {line}")


def _tuned() -> Iterator[str]:
    """A line for each tuned problem. Records of other sources of flashgen or another compiler stay in their files and are not used."""
    store = cache.current()
    versions = []
    for chip in (targets.detect_cpu(), targets.CHIPS["sm80"]):
        with suppress(CompileError):
            versions.append(list(records.version(chip)))
    for key in store.record_kinds():
        record = records.last(key)
        if record is not None and "problem" in record:
            fields = ", ".join(f"{name}={value}" for name, value in record["winner"]["fields"].items())
            stale = "" if record.get("version") in versions else " (of another version, not used)"
            variant = f" ({record['variant']})" if "variant" in record else ""
            yield f"tuned: {record['which']}, {record['problem']}{variant}, on {record['device']}: {record['winner']['family']} {fields}{stale}"


def clean(options: argparse.Namespace) -> None:
    """Remove the compiled kernels, with ``tuning`` the records of the tuner too."""
    store = cache.current()
    before = store.info()
    store.clean(tuning=options.tuning)
    tuned = f" and {before['tuned']} tuned problems" if options.tuning else ""
    print(f"Removed {before['kernels']} kernels{tuned}, {(before['bytes'] - store.info()['bytes']) / 1e6:.1f} MB, from {before['directory']}.")


def _devices() -> list[str]:
    cpu = targets.detect_cpu()
    matrix = ", AMX" if "amx_bf16" in cpu.features else ""
    lines = [f"cpu: {cpu.chip}, {cpu.cores} cores, {cpu.vector_bytes}-byte vectors{matrix}, L1 {cpu.l1_bytes // 1024} KiB, L2 {cpu.l2_bytes // 1024} KiB"]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        try:
            lines.append(f"cuda:{index}: {torch.cuda.get_device_name(index)}, target {targets.detect(index).name}")
        except FlashgenError as error:
            lines.append(f"cuda:{index}: {error}")
    return lines if len(lines) > 1 else [*lines, "cuda: none"]


def _compilers() -> list[str]:
    lines = []
    for kind, chip in (("C++", targets.detect_cpu()), ("CUDA", targets.CHIPS["sm80"])):
        try:
            lines.append(f"{kind}: {re.sub(r' [0-9]{10,}$', '', build.compiler_version(chip))}")  # without the file's time
        except CompileError as error:
            lines.append(f"{kind}: none. {error}")
    other = [path for path in map(shutil.which, ("g++", "clang++", "nvcc")) if path]
    return [*lines, "On PATH: " + (", ".join(other) or "none of g++, clang++, nvcc")]
