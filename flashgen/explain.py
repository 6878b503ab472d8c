"""Explain: what was proved of a variant, what bounds the tile, predicted traffic and time, in prose and numbers.

Form, Problem, Target, Shape -> text. Traffic is counted for one pass over the given shape: this plan's exact count of tiles, the FlashAttention
bound N^2 d^2 / M elements per head (Dao et al. 2022, theorem 2), and the standard algorithm's 4 N^2 + 4 N d (write and read of S and of P).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import bounds, families, pipeline
from .analysis import analyze
from .capture import Capture
from .form import Form, Traced
from .interval import NumberSpans, tile_truth
from .plan import Candidate, Plan
from .problem import Problem
from .target import Target

SAMPLED_TILES = 4096  # tile pairs classified one by one; longer problems are classified on an evenly spaced sample of query tiles


@dataclass(frozen=True)
class Shape:
    """The dynamic sizes that a prediction is made for."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int

    def __str__(self) -> str:
        return f"batch {self.batch}, heads {self.heads}/{self.kv_heads}, lengths {self.q_len}/{self.kv_len}"

    @staticmethod
    def of(q: Any, k: Any) -> Shape:
        return Shape(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])


@dataclass(frozen=True)
class Census:
    """Tiles of one head by class, extrapolated from the sampled query tiles."""

    full: float
    partial: float
    empty: float

    @property
    def visited(self) -> float:
        return self.full + self.partial


def census(form: Form, problem: Problem, plan: Plan, shape: Shape, numbers: Traced) -> Census:
    """Count full, partial and empty tiles of head (0, 0) by interval evaluation, as the kernel does."""
    nq, nk = -(-shape.q_len // plan.block_q), -(-shape.kv_len // plan.block_kv)
    if form.mask < 0:
        return Census(float(nq * nk), 0.0, 0.0)
    arrays = [c.tensor.detach().cpu().numpy() if c.tensor is not None and c.dtype not in ("bfloat16",) else None for c in numbers.captures]
    step = max(1, nq * nk // SAMPLED_TILES)
    tabled = bounds.tables(form, problem)
    rows = range(0, nq, step)
    counts = [0, 0, 0]
    for i in rows:
        for j in range(nk):
            leaves = {
                "q": (i * plan.block_q, min((i + 1) * plan.block_q, shape.q_len) - 1), "k": (j * plan.block_kv, min((j + 1) * plan.block_kv, shape.kv_len) - 1),
                "b": (0, 0), "h": (0, 0), "q_len": (shape.q_len,) * 2, "kv_len": (shape.kv_len,) * 2, "heads": (shape.heads,) * 2,
            }  # fmt: skip
            must, may = tile_truth(form, _Lenient(leaves, arrays, numbers.floats, numbers.ints, tabled))
            counts[0 if must else 1 if may else 2] += 1
    scale = nq / len(rows)
    return Census(*(n * scale for n in counts))


def visible_share(form: Form, problem: Problem, shape: Shape, tensors: Sequence[Any], floats: Sequence[float], ints: Sequence[int]) -> float:
    """The share of the (query, key) pairs of head (0, 0) that lie in tiles of 128 x 128 which are not empty."""
    if not shape.q_len * shape.kv_len:
        return 0.0
    numbers = Traced(form, tuple(Capture(t) for t in tensors), tuple(floats), tuple(ints), ())
    tiles = census(form, problem, Plan("", "", (("block_kv", 128), ("block_q", 128))), shape, numbers)
    return tiles.visited / (tiles.visited + tiles.empty)


class _Lenient(NumberSpans):
    """Captures that are not at hand (an input, a 16-bit float) are unknown."""

    def load(self, slot: int, kind: str, indices: Any) -> tuple:
        return super().load(slot, kind, indices) if self.captures[slot] is not None else (-(1 << 61), 1 << 61)


def explain(
    form: Form, problem: Problem, target: Target, shape: Shape, *, family: str | None, forced: Mapping[str, int], use_records: bool, numbers: Traced
) -> str:  # fmt: skip
    """The whole report."""
    facts = analyze(form)
    _, passed = families.choose(problem, target, family)
    chosen = pipeline.planned(form, problem, target, family, forced, use_records=use_records)
    name = chosen.family
    ranked = pipeline.ranked(form, problem, target, name, forced)
    best = next((c for c in ranked if c.plan == chosen), ranked[0])
    lines = [
        f"{problem.which} on {target.name} ({target.chip}, {target.status}), {problem.dtype}, head dims {problem.head_dim_qk}/{problem.head_dim_v}, {shape}"
    ]
    lines += [f"Family: {name}." + "".join(f" Passed over {n}: {' '.join(r)}" for n, r in passed.items())]
    lines += ["", "Proved", *(f"  {_with_values(s, numbers)}" for s in facts.sentences)]
    tiles = census(form, problem, best.plan, shape, numbers)
    lines += [
        f"  Tiles of {best.plan.block_q} x {best.plan.block_kv} per head: {tiles.full:.0f} full (no mask code), {tiles.partial:.0f} partial, "
        f"{tiles.empty:.0f} empty (never loaded)."
    ]
    tuned = use_records and chosen == pipeline.recorded(form, problem, target, family, forced)
    origin = "measured: a record of the tuner" if tuned else "the choice of the tiler"
    lines += ["", f"Plan ({origin})", f"  {best.plan}", *(f"  {n}: {used} of {limit} {unit}" for n, used, limit, unit in best.usage)]
    tight = best.binding
    lines += [f"  What bounds the tile: {tight[0]} ({tight[1]} of {tight[2]} {tight[3]})."]
    lines += _rejections(ranked)
    lines += ["", "Predicted", *_prediction(problem, target, shape, best.plan, tiles)]
    return "\n".join(lines)


def _with_values(sentence: str, numbers: Traced) -> str:
    """Captured numbers by their present values instead of the names that the emitted text gives them."""
    return re.sub(r"\bint_(\d+)\b", lambda m: str(numbers.ints[int(m[1])]), sentence)


def _rejections(ranked: list[Candidate]) -> list[str]:
    rejected = [c for c in ranked if c.rejected]
    lines = [f"  {len(ranked)} candidates, {len(rejected)} rejected" + (":" if rejected else ".")]
    return lines + [f"    {dict(c.plan.fields)}: {'; '.join(c.rejected)}" for c in rejected[:4]] + (["    ..."] if len(rejected) > 4 else [])


def _prediction(problem: Problem, target: Target, shape: Shape, plan: Plan, tiles: Census) -> list[str]:
    d, dv, size = problem.head_dim_qk, problem.head_dim_v, problem.dtype_bytes
    heads = shape.batch * shape.heads
    backward = problem.which == "backward"
    # one pass loads the rows of a q tile once and K, V of every visited tile; the backward also moves dO, dQ, dK, dV and visits per kv tile
    per_tile = plan.block_kv * (d + dv) if not backward else plan.block_q * (d + dv) * 2
    own = shape.q_len * (d + dv) if not backward else 2 * shape.kv_len * (d + dv)
    elements = heads * (own + tiles.visited * per_tile)
    m_elements = (target.smem_block_bytes or target.l2_bytes) / size
    n2 = shape.q_len * shape.kv_len
    bound = heads * n2 * max(d, dv) ** 2 / m_elements
    standard = heads * (4 * n2 + 2 * (shape.q_len + shape.kv_len) * max(d, dv)) * (2.5 if backward else 1)
    flops = 2 * heads * tiles.visited * plan.block_q * plan.block_kv * ((d + dv) if not backward else 3 * d + 2 * dv)
    compulsory = size * (heads * shape.q_len * (d + dv) + shape.batch * shape.kv_heads * shape.kv_len * (d + dv)) * (2 if backward else 1)
    rate = target.tensor_tflops if size == 2 else target.tensor_tflops / (8 if target.kind == "cuda" else 4)
    compute_ms, memory_ms = flops / rate / 1e9, compulsory / target.hbm_gbs / 1e6
    return [
        f"  Traffic, this plan: {elements * size / 1e6:.1f} MB between memory levels (tiles loaded, rows in and out).",
        f"  Traffic, FlashAttention bound N^2 d^2 / M: {bound * size / 1e6:.1f} MB with M = {m_elements:.0f} elements.",
        f"  Traffic, standard algorithm 4 N^2 + 4 N d: {standard * size / 1e6:.1f} MB ({standard / max(elements, 1):.1f} x this plan's).",
        f"  Roofline: {flops / 1e9:.1f} GFLOP at {rate:.2f} TFLOP/s = {compute_ms:.3f} ms; "
        f"{compulsory / 1e6:.1f} MB at {target.hbm_gbs:.0f} GB/s = {memory_ms:.3f} ms.",
        f"  Bound by {'arithmetic' if compute_ms > memory_ms else 'memory'} ({max(compute_ms, memory_ms):.3f} ms).",
    ]
