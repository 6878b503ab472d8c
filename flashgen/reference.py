"""Reference: a Variant evaluated eagerly in torch, the oracle of the tests. Quadratic memory; differentiable to any order.

Variant, q, k, v -> out, lse, max_scores. Example: ``reference(variant, q.double(), k.double(), v.double())``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from . import checks
from .calls import seed_tensor
from .capture import resolve
from .evaluate import evaluate
from .form import Traced
from .variant import Variant


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> list[Tensor]:
    """The four words of Philox4x32-10 (Salmon et al. 2011) for int64 tensors that hold 32-bit unsigned words."""
    low, words = 0xFFFFFFFF, list(counter)
    for i in range(10):
        first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57  # modulo 2^64, of which both halves are read
        halves = [(k + i * step) & low for k, step in zip(key, (0x9E3779B9, 0xBB67AE85))]
        words = [(second >> 32 & low) ^ words[1] ^ halves[0], second & low, (first >> 32 & low) ^ words[3] ^ halves[1], first & low]
    return words


def kept(p: float, seed: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """bool ``(B, Hq, Lq, Lk)``: which entries dropout keeps, for a seed of ``calls.seed_tensor``."""
    b, h, q_len, kv_len = shape
    axis = lambda n, at: torch.arange(n, dtype=torch.int64, device=seed.device).view([-1 if i == at else 1 for i in range(4)])  # noqa: E731
    head = axis(b, 0) * h + axis(h, 1)
    words = philox((axis(-(-kv_len // 4), 3), axis(q_len, 2), head, torch.zeros_like(head)), (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    drawn = torch.stack([w.expand(b, h, q_len, -(-kv_len // 4)) for w in words], -1).flatten(-2)[..., :kv_len]
    return drawn >= math.ceil(p * 2.0**32)


def reference(
    variant: Variant,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    seqlens_k: Tensor | None = None,
    sink: Tensor | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """out ``(B, Hq, Lq, Dv)``, lse and max_scores ``(B, Hq, Lq)``, computed in q's dtype with scores in float32 (float64 for float64 inputs)."""
    checks.dropout(dropout_p, seed)
    traced: Traced = variant.trace(dict(inputs or {}))
    form, real = traced.form, torch.float64 if q.dtype == torch.float64 else torch.float32
    (B, H, Lq, D), Lk = q.shape, k.shape[2]
    k, v = (t.expand(B, -1, -1, -1).repeat_interleave(H // t.shape[1], 1) for t in (k, v))
    scale = D**-0.5 if variant.scale is None else variant.scale
    axis = lambda n, at: torch.arange(n, dtype=torch.int32, device=q.device).view([-1 if i == at else 1 for i in range(4)])  # noqa: E731
    lengths = torch.full((B,), Lk, dtype=torch.int32, device=q.device) if seqlens_k is None else seqlens_k.to(torch.int32)
    symbols = {
        "b": axis(B, 0), "h": axis(H, 1), "q": axis(Lq, 2), "k": axis(Lk, 3), "kv_len": lengths.view(B, 1, 1, 1),
        "q_len": torch.tensor(Lq, dtype=torch.int32, device=q.device), "heads": torch.tensor(H, dtype=torch.int32, device=q.device),
    }  # fmt: skip
    captures = resolve(traced.captures, dict(inputs or {}), q.device)
    visible = (symbols["k"] < symbols["kv_len"]).expand(B, H, Lq, Lk)
    if form.mask >= 0:
        visible = visible & evaluate(form, form.mask, symbols, captures, traced.floats, traced.ints, real)
    s = (q @ k.transpose(-1, -2)).to(real) * scale
    if form.score >= 0:
        s = evaluate(form, form.score, symbols | {"s": s}, captures, traced.floats, traced.ints, real).expand(B, H, Lq, Lk)
    s = torch.where(visible, s, torch.full_like(s, -math.inf))
    top = s.detach().amax(-1) if Lk else s.new_full((B, H, Lq), -math.inf)
    base = top if sink is None else torch.maximum(top, sink.detach().to(real).view(1, H, 1))
    base = torch.where(base == -math.inf, torch.zeros_like(base), base)
    p = torch.where(visible, torch.exp(s - base[..., None]), torch.zeros_like(s))
    total = p.sum(-1)
    if sink is not None:
        total = total + torch.exp(sink.to(real).view(1, H, 1) - base)
    empty = total == 0
    safe = torch.where(empty, torch.ones_like(total), total)
    weights = p / safe[..., None]
    if dropout_p:
        weights = torch.where(kept(dropout_p, seed_tensor(seed, q.device), (B, H, Lq, Lk)), weights / (1 - dropout_p) if dropout_p < 1 else weights, 0)
    out = weights.to(q.dtype) @ torch.where(torch.isfinite(v), v, torch.zeros_like(v))
    lse = torch.where(empty, torch.full_like(total, -math.inf), base + safe.log())
    return out, lse, top


__all__ = ["reference"]
