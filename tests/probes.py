"""Evaluating a traced form and the very Python function it came from at the same points: shared by the tests of the front half."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

import flashgen
from flashgen.evaluate import evaluate
from flashgen.form import Form, Traced

SIZES = {"b": 2, "h": 4, "q": 19, "k": 23}


def trace(score: Any = None, mask: Any = None) -> Traced:
    return flashgen.Variant(score=score, mask=mask).trace({})


def replayed(traced: Traced) -> list[torch.Tensor]:
    """The captured tensors of a call made now."""
    from flashgen.capture import resolve

    return resolve(traced.captures, {}, torch.device("cpu"))


def axes(sizes: dict[str, int], **extra: Any) -> dict[str, torch.Tensor]:
    """Index tensors that broadcast to (b, h, q, k)."""
    grid = {n: torch.arange(size, dtype=torch.int32).view([-1 if i == at else 1 for i in range(4)]) for at, (n, size) in enumerate(sizes.items())}
    lengths = {"q_len": sizes["q"], "kv_len": sizes["k"], "heads": sizes["h"]}
    return grid | {n: torch.tensor(size, dtype=torch.int32) for n, size in lengths.items()} | extra


def value(traced: Traced, root: int, symbols: dict[str, torch.Tensor], real: torch.dtype = torch.float32) -> torch.Tensor:
    return evaluate(traced.form, root, symbols, replayed(traced), traced.floats, traced.ints, real)


def score_root(form: Form) -> int:
    """The node of the score; the identity keeps none."""
    return form.score


def table(mask: Any, q_len: int, kv_len: int, *, batch: int = 1, heads: int = 1) -> torch.Tensor:
    """(batch, heads, q_len, kv_len) bools of a mask by evaluating its form."""
    traced = trace(mask=mask)
    sizes = {"b": batch, "h": heads, "q": q_len, "k": kv_len}
    shape = (batch, heads, q_len, kv_len)
    if traced.form.mask < 0:
        return torch.ones(shape, dtype=torch.bool)
    return value(traced, traced.form.mask, axes(sizes)).expand(shape)


def brute(f: Callable[[int, int, int, int], bool], q_len: int, kv_len: int, *, batch: int = 1, heads: int = 1) -> torch.Tensor:
    """The same by a formula on Python integers."""
    rows = [[[[bool(f(b, h, q, k)) for k in range(kv_len)] for q in range(q_len)] for h in range(heads)] for b in range(batch)]
    return torch.tensor(rows, dtype=torch.bool).view(batch, heads, q_len, kv_len)


def points(count: int, seed: int, real: torch.dtype, sizes: dict[str, int] = SIZES) -> list[dict[str, torch.Tensor]]:
    """Random (s, b, h, q, k) as 0-d tensors, the way FlexAttention calls its functions."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        point = {n: torch.tensor(rng.randrange(size), dtype=torch.int32) for n, size in sizes.items()}
        found.append(point | {"s": torch.tensor(rng.choice((rng.gauss(0, 2), rng.uniform(-1, 1), 0.0, 1.0)), dtype=real)})
    return found


def stacked(found: list[dict[str, torch.Tensor]], sizes: dict[str, int] = SIZES) -> dict[str, torch.Tensor]:
    """The points as vectors, with the lengths."""
    lengths = {"q_len": sizes["q"], "kv_len": sizes["k"], "heads": sizes["h"]}
    return {n: torch.stack([p[n] for p in found]) for n in found[0]} | {n: torch.tensor(size, dtype=torch.int32) for n, size in lengths.items()}
