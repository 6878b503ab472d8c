"""Workspaces: the device memory that the kernels of a pass need beside its tensors.

Family's records -> Memory. Example: ``Workspaces(wanted, device).allocate().addresses``. Small ones are kept, and zeros that kernels
leave: the launches of one thread on one stream run one after another, so that all passes share them. A CUDA graph may be replayed on any stream beside
other launches: what it captures has its own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .families import Workspace

KEPT_BYTES = 1 << 20  # of scratch: more is allocated by each launch, and reused by torch's allocator in stream order
ALIGNMENT = 256  # bytes


class Memory(NamedTuple):
    """The addresses of workspaces, and what has to be held until the launch is queued."""

    addresses: tuple[int, ...]
    held: tuple[Tensor | None, ...]


class Workspaces:
    """The workspaces of one shape; ``fields`` names them in the order of the addresses."""

    def __init__(self, wanted: Sequence[Workspace], device: torch.device):
        self._device = device
        self._zeroed = [w for w in wanted if w.zeroed]
        scratch = [w for w in wanted if not w.zeroed]
        self.fields = tuple(w.field for w in (*self._zeroed, *scratch))
        self._offsets, self._scratch_bytes = [], 0  # one allocation for all
        for w in scratch:
            self._offsets.append(self._scratch_bytes)
            self._scratch_bytes += -(-w.elements * _dtype(w).itemsize // ALIGNMENT) * ALIGNMENT

    def allocate(self, stream: int | None = None) -> Memory:
        """Those of one launch on a stream, its own but for zeros that are kept; None: of a captured one, which shares nothing."""
        zeroed = [_new_zeros(w, self._device) if stream is None or not w.kept else _kept_zeros(w, self._device, stream) for w in self._zeroed]
        return self._memory(zeroed, torch.empty(self._scratch_bytes, dtype=torch.uint8, device=self._device))

    def kept(self, stream: int) -> Memory | None:
        """Those of all launches of this thread on a stream, torch's current one; None if each has to have its own."""
        if self._scratch_bytes > KEPT_BYTES or not all(w.kept for w in self._zeroed):
            return None
        return self._memory([_kept_zeros(w, self._device, stream) for w in self._zeroed], _kept_scratch(self._device, stream) if self._offsets else None)

    def _memory(self, zeroed: list[Tensor], scratch: Tensor | None) -> Memory:
        start = 0 if scratch is None else scratch.data_ptr()
        addresses = [t.data_ptr() for t in zeroed] + [start + offset for offset in self._offsets]
        return Memory(tuple(addresses), (*zeroed, scratch))


def _dtype(w: Workspace) -> torch.dtype:
    return getattr(torch, w.dtype)


_zeros: dict[Any, Tensor] = {}
_scratch = threading.local()


def _kept_zeros(w: Workspace, device: torch.device, stream: int) -> Tensor:
    """What every kernel leaves as zeros: one allocation per stream, whose kernels never overlap."""
    key = (w.elements, w.dtype, device, stream)
    if key not in _zeros:
        _zeros[key] = _new_zeros(w, device)
    return _zeros[key]


def _new_zeros(w: Workspace, device: torch.device) -> Tensor:
    return torch.zeros(w.elements, dtype=_dtype(w), device=device)


def _kept_scratch(device: torch.device, stream: int) -> Tensor:
    """KEPT_BYTES of this thread, for whatever it launches on a stream."""
    found: dict[Any, Tensor] = _scratch.__dict__.setdefault("by_stream", {})
    if (device, stream) not in found:
        found[(device, stream)] = torch.empty(KEPT_BYTES, dtype=torch.uint8, device=device)
    return found[(device, stream)]
