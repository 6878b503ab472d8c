"""Cases of a benchmark: shapes, and variants written once for this project and once for torch's FlexAttention.

Case -> its Variant, its mask and score as FlexAttention takes them, and its exact count of operations. Example: ``Case(1, 16, 16, 16384, 128, "bfloat16",
"document").made("cuda").variant``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import flashgen

WINDOW = 1024  # keys of the windows
SINK = 64  # keys at the beginning that a window keeps
PREFIX = 2048  # keys that every row sees of "prefix"
CHUNK = 2048  # rows and keys of a chunk
STEP = 4  # "dilated": every fourth key
CAP = 30.0
DOCUMENTS = (1531, 977, 2890, 311, 1203, 640, 3017, 88, 1450, 2048, 733, 1496)  # lengths of "document", over and over
BLOCK = 128  # rows and keys of a block of "blocks"
EMPTY_BLOCKS = 0.9  # share of its blocks that nobody sees

Function = Callable[..., Any]  # a mask or score as FlexAttention takes it


@dataclass(frozen=True)
class _Made:
    variant: flashgen.Variant
    mask: Function | None
    score: Function | None = None
    learned: tuple[torch.Tensor, ...] = ()  # captured tensors whose gradients a backward is to compute as well


@dataclass(frozen=True)
class Case:
    """One cell of a benchmark. ``variant`` is a name in VARIANTS; all but "full", "blocks", "chunked" and, in its prefix, "prefix" are causal."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    dtype: str
    variant: str = "full"

    @property
    def name(self) -> str:
        return f"B{self.batch} H{self.heads}/{self.kv_heads} N{self.length} D{self.head_dim} {self.dtype} {self.variant}"

    @property
    def plain(self) -> Case:
        """The case without its score function; those in SCORES are causal."""
        return replace(self, variant="causal")

    def bytes(self) -> float:
        """Of a forward: q, k, v read once and the output written once."""
        return 2.0 * self.batch * (self.heads + self.kv_heads) * self.length * self.head_dim * getattr(torch, self.dtype).itemsize

    def flops(self) -> float:
        """Of a forward: multiply-adds on exact (query, key) pairs, counted as 2."""
        return 4.0 * self.batch * self.heads * _pairs(self) * self.head_dim

    def made(self, device: str) -> _Made:
        if self.variant not in VARIANTS:
            raise flashgen.VariantError(f"variant={self.variant!r}: {', '.join(VARIANTS)}.")
        return _make(self, device)


@functools.lru_cache(2)
def _make(case: Case, device: str) -> _Made:
    """Once, so that all peers have the same captured tensors."""
    return VARIANTS[case.variant](case, device)


def _causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def _full(case: Case, device: str) -> _Made:
    return _Made(flashgen.Variant(head_dim=case.head_dim), None)


def _plain_causal(case: Case, device: str) -> _Made:
    return _Made(flashgen.Variant(head_dim=case.head_dim, mask=flashgen.causal), _causal)


def _softcap(case: Case, device: str) -> _Made:
    variant = flashgen.Variant(head_dim=case.head_dim, mask=flashgen.causal, score=flashgen.softcap(CAP))
    return _Made(variant, _causal, lambda s, b, h, q, k: CAP * torch.tanh(s / CAP))


def _alibi(case: Case, device: str) -> _Made:
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / case.heads) for h in range(case.heads)], device=device)
    variant = flashgen.Variant(head_dim=case.head_dim, mask=flashgen.causal, score=flashgen.alibi())
    return _Made(variant, _causal, lambda s, b, h, q, k: s - slopes[h] * (q - k))


def _polynomial(case: Case, device: str) -> _Made:
    score = lambda s, b, h, q, k: s + 0.05 * s * s - 0.002 * s * s * s  # noqa: E731
    return _Made(flashgen.Variant(head_dim=case.head_dim, mask=flashgen.causal, score=score), _causal, score)


def _table(case: Case, device: str, learned: bool = False) -> _Made:
    """A bias by distance, one for each."""
    table = torch.randn(case.heads, 2 * case.length - 1, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_(learned)
    variant = flashgen.Variant(head_dim=case.head_dim, mask=flashgen.causal, score=flashgen.relative_bias(table))
    last = case.length - 1
    return _Made(variant, _causal, lambda s, b, h, q, k: s + table[h, q - k + last], (table,) if learned else ())


def _learned_table(case: Case, device: str) -> _Made:
    return _table(case, device, learned=True)


def _window(case: Case, device: str) -> _Made:
    mask = flashgen.causal & flashgen.sliding_window(WINDOW - 1, 0)
    return _Made(flashgen.Variant(head_dim=case.head_dim, mask=mask), lambda b, h, q, k: (q >= k) & (q - k < WINDOW))


def _sink_window(case: Case, device: str) -> _Made:
    mask = flashgen.causal & (flashgen.sliding_window(WINDOW - 1, 0) | flashgen.Mask(lambda b, h, q, k: k < SINK))
    return _Made(flashgen.Variant(head_dim=case.head_dim, mask=mask), lambda b, h, q, k: (q >= k) & ((q - k < WINDOW) | (k < SINK)))


def _prefix(case: Case, device: str) -> _Made:
    return _Made(flashgen.Variant(head_dim=case.head_dim, mask=flashgen.prefix_lm(PREFIX)), lambda b, h, q, k: (q >= k) | (k < PREFIX))


def _chunked(case: Case, device: str) -> _Made:
    return _Made(flashgen.Variant(head_dim=case.head_dim, mask=flashgen.chunked(CHUNK)), lambda b, h, q, k: q // CHUNK == k // CHUNK)


def _dilated(case: Case, device: str) -> _Made:
    mask = flashgen.causal & flashgen.dilated(STEP)
    return _Made(flashgen.Variant(head_dim=case.head_dim, mask=mask), lambda b, h, q, k: (q >= k) & ((q - k) % STEP == 0))


def _document(case: Case, device: str) -> _Made:
    lengths = torch.tensor(DOCUMENTS).repeat(-(-case.length // sum(DOCUMENTS)))
    ids = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths)[: case.length].to(device)
    variant = flashgen.Variant(head_dim=case.head_dim, mask=flashgen.causal & flashgen.document(ids))
    return _Made(variant, lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]))


def _blocks(case: Case, device: str) -> _Made:
    """Blocks at random, the diagonal among them."""
    side = -(-case.length // BLOCK)
    seen = torch.rand(side, side, generator=torch.Generator().manual_seed(3))
    seen = seen.fill_diagonal_(-1.0).argsort(1).argsort(1) < max(1, round(side * (1 - EMPTY_BLOCKS)))
    seen = seen.to(device)
    variant = flashgen.Variant(head_dim=case.head_dim, mask=flashgen.block_sparse(seen, BLOCK))
    return _Made(variant, lambda b, h, q, k: seen[q // BLOCK, k // BLOCK])


VARIANTS: dict[str, Callable[[Case, str], _Made]] = {
    "full": _full, "causal": _plain_causal, "softcap": _softcap, "alibi": _alibi, "polynomial": _polynomial, "table": _table,
    "learned_table": _learned_table, "window": _window,
    "sink_window": _sink_window, "prefix": _prefix, "chunked": _chunked, "dilated": _dilated, "document": _document, "blocks": _blocks,
}  # fmt: skip

SCORES = ("softcap", "alibi", "polynomial", "table", "learned_table")  # causal attention with a score function


@functools.lru_cache(64)
def _pairs(case: Case) -> int:
    mask, rows = case.made("cpu").mask, 512
    if mask is None:
        return case.length**2
    keys, zero = torch.arange(case.length), torch.tensor(0)
    return sum(int(mask(zero, zero, q[:, None], keys).sum()) for q in torch.arange(case.length).split(rows))
