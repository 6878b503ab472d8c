"""Calls: what names a kernel, what one call gives it, and the Problem that they make.

Handle (a kernel's name across processes) + Call -> Problem. Example: ``forward_problem(handle, call, aligned)``. The passes of a call are in ``passes``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import target as targets
from .errors import DeviceError
from .families import Sizes
from .form import Form
from .packing import pack_group
from .plan import FEW_ROWS, size_class
from .problem import Problem
from .score_bounds import static_bounds


class Handle(NamedTuple):
    """What names a kernel across processes: the form and the options that are not in the tensors."""

    form: str
    layout: str = "dense"
    lse: bool = True
    max_scores: bool = False
    out_low: bool = False
    target: str | None = None
    family: str | None = None
    plan: tuple[tuple[str, int], ...] | None = None
    tune: bool | None = None  # None: a recorded winner, else the tiler's choice; True: measured where there is no record; False: records are ignored

    @property
    def text(self) -> str:
        return json.dumps(self, separators=(",", ":"))


@lru_cache(maxsize=4096)
def parse_handle(text: str) -> tuple[Handle, Form]:
    handle = Handle(*json.loads(text))
    handle = handle._replace(plan=None if handle.plan is None else tuple((name, value) for name, value in handle.plan))
    return handle, Form.parse(handle.form)


class Call(NamedTuple):
    """One call's tensors and numbers, as the operators take them."""

    q: Tensor  # dense (B, H, L, D); varlen (T, H, D)
    k: Tensor
    v: Tensor
    sink: Tensor | None
    seqlens_k: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    captures: list[Tensor]
    floats: list[float]
    ints: list[int]
    scale: float
    max_q: int  # longest query sequence (varlen); dense: Lq
    max_k: int
    seed: Tensor | None = None  # of dropout: its 64 bits as one int64 on q's device; None: no dropout
    dropout_p: float = 0.0


class Backward(NamedTuple):
    """What a backward takes beside the Call. ``slots`` are the captures whose gradient is wanted."""

    dout: Tensor
    dlse: Tensor | None
    out: Tensor
    out_low: Tensor  # empty when not kept
    lse: Tensor
    wanted: list[bool]  # dq, dk, dv
    slots: list[int]
    deterministic: bool


def resolve_target(name: str | None, device: torch.device) -> targets.Target:
    """The chip to build for; DeviceError when a forced target is not the tensors' device."""
    native = targets.detect(device.index or 0) if device.type == "cuda" else targets.detect_cpu()
    if name is not None and name != native.name:
        raise DeviceError(
            f"the kernel was compiled with target={name!r}, but the tensors are on {device} ({native.name}): use target=None, or build() and source() only."
        )
    return native


@lru_cache(maxsize=64)
def target_of(name: str | None, device: torch.device) -> targets.Target:
    return resolve_target(name, device)


# ---- tensors as kernels read and write them


def rows_adjacent(t: Tensor) -> Tensor:
    """Rows whose elements are adjacent; anything else is copied."""
    return t if t.stride(-1) == 1 else t.contiguous()


def strides_aligned(tensors: Iterable[Tensor]) -> bool:
    """Every row starts on 16 bytes if the first one does, and none is another one's: TMA knows no stride of 0 from row to row."""
    return all(
        (s * t.element_size() % 16 == 0 and (s > 0 or axis != t.dim() - 2)) or n <= 1
        for t in tensors
        for axis, (s, n) in enumerate(zip(t.stride()[:-1], t.shape[:-1]))
    )


def stored(t: Tensor) -> Tensor:
    """A tensor whose memory holds its values: torch also has views that negate what they read, and zeros without memory."""
    if t.is_neg():
        return t.resolve_neg()
    return torch.zeros(t.shape, dtype=t.dtype, device=t.device) if t._is_zerotensor() else t


def prepared(c: Call) -> Call:
    """Rows adjacent, the sink and the integer tensors as the kernels read them, no capture without an element."""
    plain = c.sink is None and c.seqlens_k is None and c.cu_seqlens_q is None and not c.captures
    q, k, v = stored(c.q), stored(c.k), stored(c.v)
    if plain and q is c.q and k is c.k and v is c.v and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return c
    real = torch.float64 if c.q.dtype == torch.float64 else torch.float32
    integers: dict[str, Any] = {n: stored(t).contiguous() for n in ("seqlens_k", "cu_seqlens_q", "cu_seqlens_k") if (t := getattr(c, n)) is not None}
    captures = [stored(t) if t.numel() else t.new_zeros([max(n, 1) for n in t.shape]) for t in c.captures]
    captures = [t if t.dim() == 0 or t.stride(-1) < 1 << 28 else t.contiguous() for t in captures]  # kernels take it as an int, in bytes
    sink = None if c.sink is None else stored(c.sink.detach()).to(real).contiguous()
    return c._replace(q=rows_adjacent(q), k=rows_adjacent(k), v=rows_adjacent(v), sink=sink, captures=captures, **integers)


def packed_heads(form: Form, c: Call) -> tuple[Form, Call, Callable[[Tensor], Tensor]]:
    """A decoding step of grouped heads as one row per head of a kv head: its form and call, and the view that makes rows of heads in q, out or lse."""
    group = c.q.shape[1] // c.k.shape[1] if c.q.dim() == 4 and c.k.shape[1] else 1
    if c.q.dim() != 4 or c.q.shape[2] != 1 or not 1 < group <= FEW_ROWS or c.sink is not None or c.seed is not None:  # which count heads
        return form, c, lambda t: t
    rows: Callable[[Tensor], Tensor] = lambda t: t.squeeze(2).unflatten(1, (c.k.shape[1], group))  # noqa: E731
    return pack_group(form, group), c._replace(q=rows(c.q), max_q=group), rows


def output_like(t: Tensor, last: int, dtype: torch.dtype) -> Tensor:
    """An output with t's shape but ``last`` columns, its dimensions in t's memory order, rows adjacent."""
    shape = (*t.shape[:-1], last)
    if t.dim() == 4 and t.stride(1) < t.stride(2) and t.shape[1] > 1:
        return torch.empty((shape[0], shape[2], shape[1], last), dtype=dtype, device=t.device).transpose(1, 2)
    return torch.empty(shape, dtype=dtype, device=t.device)


def statistics_of(q: Tensor) -> Tensor:
    """An lse-shaped tensor: (B, H, L), or (H, T) for packed sequences."""
    shape = q.shape[:3] if q.dim() == 4 else (q.shape[1], q.shape[0])
    return torch.empty(shape, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32, device=q.device)


def seed_tensor(seed: int | None, device: torch.device) -> Tensor:
    """A 64-bit unsigned seed as the int64 of equal bits; None: drawn from torch's generator of the device. No synchronisation."""
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)
    if seed >= 2**63:  # a range makes torch.compile read a symbolic integer that would not fit its int64
        seed = range(seed, seed + 1)[0] - 2**64
    return torch.full((1,), seed, dtype=torch.int64, device=device)


# ---- what a call asks of a kernel


def sizes_of(c: Call) -> Sizes:
    """The lengths that launch rules read."""
    if c.q.dim() == 4:
        return Sizes(c.q.shape[0], c.q.shape[1], c.k.shape[1], c.q.shape[2], c.k.shape[2], c.q.shape[2], c.k.shape[2])
    assert c.cu_seqlens_q is not None
    return Sizes(c.cu_seqlens_q.shape[0] - 1, c.q.shape[1], c.k.shape[1], c.max_q, c.max_k, c.q.shape[0], c.k.shape[0])


def _problem(handle: Handle, c: Call, aligned: bool, **fields: Any) -> Problem:
    return Problem(
        dtype=str(c.q.dtype)[6:], head_dim_qk=c.q.shape[-1], head_dim_v=c.v.shape[-1], group=c.q.shape[1] // c.k.shape[1], layout=handle.layout,
        sink=c.sink is not None, seqlens_k=c.seqlens_k is not None, dropout=c.seed is not None, scale_sign=(c.scale > 0) - (c.scale < 0), aligned=aligned,
        size=size_class_of(c), **fields,
    )  # fmt: skip


def size_class_of(c: Call) -> str:
    return size_class(*((c.q.shape[2], c.k.shape[2]) if c.q.dim() == 4 else (c.max_q, c.max_k)))


def backward_problem(handle: Handle, c: Call, b: Backward, aligned: bool) -> Problem:
    return _problem(
        handle, c, aligned, which="backward", deterministic=b.deterministic, dlse=b.dlse is not None, dq=b.wanted[0], dk=b.wanted[1], dv=b.wanted[2],
        capture_grads=tuple(b.slots), out_low=b.out_low is not None and b.out_low.numel() > 0,
    )  # fmt: skip


def forward_problem(handle: Handle, c: Call, aligned: bool) -> Problem:
    form = parse_handle(handle.text)[1]
    proved = static_bounds(form, c.floats, c.scale) if c.q.element_size() == 2 else {}  # only kernels of 16-bit types ask
    return _problem(handle, c, aligned, which="forward", lse=True, max_scores=handle.max_scores, out_low=keeps_low(handle, c.q), **proved)


def keeps_low(handle: Handle, q: Tensor) -> bool:
    return handle.out_low and q.element_size() == 2
