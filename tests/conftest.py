"""Settings of the whole suite: a kernel cache of its own, shared by pytest's workers so that each binary is built once; GPU tests skip without a GPU."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch

# An explicit FLASHGEN_CACHE (CI's empty one) wins; else one folder per checkout, outside of it.
os.environ.setdefault("FLASHGEN_CACHE", str(Path(tempfile.gettempdir()) / f"flashgen-tests-{os.getuid()}"))


def pytest_configure(config: pytest.Config) -> None:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
