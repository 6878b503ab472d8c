"""Traffic: tiles of a mask by class, and the bytes and operations that a pass is predicted to need.

Form, Plan, Shape -> Census -> Traffic. Traffic is counted for one pass over the given shape: this plan's exact count of tiles, the FlashAttention bound
N^2 d^2 / M elements per head (Dao et al. 2022, theorem 2), and the standard algorithm's 4 N^2 + 4 N d (write and read of S and of P).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import bounds
from .capture import Capture
from .form import Form, Traced
from .interval import NumberSpans, tile_truth
from .plan import Plan
from .problem import Problem
from .target import Target

MOST_SHAPES = 8  # groups of packed sequences that a prediction tells apart
EMPTY, PARTIAL, FULL = 0, 1, 2  # classes of a tile, as in fg/base.h
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
    def of_packed(q_lens: Sequence[int], k_lens: Sequence[int], heads: int, kv_heads: int) -> tuple[Shape, ...]:
        """Packed sequences as batches of like ones: of equal lengths, or of the mean lengths of MOST_SHAPES groups where there are more."""
        ordered = sorted((n for n in zip(q_lens, k_lens) if n[0]), key=lambda n: (n[0] * n[1], n))
        size = -(-len(ordered) // MOST_SHAPES) if len(set(ordered)) > MOST_SHAPES else 0
        groups = [ordered[i : i + size] for i in range(0, len(ordered), size)] if size else [[n] * ordered.count(n) for n in dict.fromkeys(ordered)]
        mean = lambda group, i: round(sum(n[i] for n in group) / len(group))  # noqa: E731
        return tuple(Shape(len(group), heads, kv_heads, mean(group, 0), mean(group, 1)) for group in groups)

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
    classify = classifier(form, problem, shape, numbers)
    step = max(1, nq * nk // SAMPLED_TILES)
    rows = range(0, nq, step)
    counts = [0, 0, 0]
    for i in rows:
        q_span = (i * plan.block_q, min((i + 1) * plan.block_q, shape.q_len) - 1)
        for j in range(nk):
            counts[classify(q_span, (j * plan.block_kv, min((j + 1) * plan.block_kv, shape.kv_len) - 1))] += 1
    scale = nq / max(1, len(rows))
    return Census(full=counts[FULL] * scale, partial=counts[PARTIAL] * scale, empty=counts[EMPTY] * scale)


def classifier(
    form: Form, problem: Problem, shape: Shape, numbers: Traced, b: int = 0, h: int = 0
) -> Callable[[tuple[int, int], tuple[int, int]], int]:
    """(first and last query, first and last key) -> EMPTY, PARTIAL or FULL for batch item b and head h, by interval evaluation as in the kernels."""
    arrays = [c.tensor.detach().cpu().numpy() if c.tensor is not None and c.dtype not in ("bfloat16",) else None for c in numbers.captures]
    tabled = bounds.tables(form, problem)
    fixed = {"b": (b, b), "h": (h, h), "q_len": (shape.q_len,) * 2, "kv_len": (shape.kv_len,) * 2, "heads": (shape.heads,) * 2}

    def classify(q: tuple[int, int], k: tuple[int, int]) -> int:
        must, may = tile_truth(form, _Lenient({"q": q, "k": k, **fixed}, arrays, numbers.floats, numbers.ints, tabled))
        return FULL if must else PARTIAL if may else EMPTY

    return classify


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


@dataclass(frozen=True)
class Traffic:
    """Predicted needs of one pass; ``fast_elements`` is M, the elements that fit the fast memory (shared memory of a block, or a core's L2)."""

    plan_bytes: float  # moved between memory levels by this plan: tiles loaded, rows in and out
    bound_bytes: float
    standard_bytes: float
    compulsory_bytes: float  # every input read once, every output written once
    fast_elements: float
    flops: float
    tflops: float  # the chip's rate for the dtype, TFLOP/s
    hbm_gbs: float

    @property
    def compute_ms(self) -> float:
        return self.flops / self.tflops / 1e9

    @property
    def memory_ms(self) -> float:
        return self.compulsory_bytes / self.hbm_gbs / 1e6


def forecast(form: Form, problem: Problem, target: Target, shapes: Sequence[Shape], plan: Plan, numbers: Traced) -> tuple[Census, Traffic]:
    """The tiles of a head of all shapes together (of one, of one batch item), and what the pass needs for all of them."""
    tiles = [census(form, problem, plan, shape, numbers) for shape in shapes]
    parts = [predict(problem, target, shape, plan, n) for shape, n in zip(shapes, tiles)]
    if len(shapes) == 1:
        return tiles[0], parts[0]
    count = lambda kind: sum(getattr(n, kind) * shape.batch for shape, n in zip(shapes, tiles))  # noqa: E731
    added = {name: sum(getattr(t, name) for t in parts) for name in ("plan_bytes", "bound_bytes", "standard_bytes", "compulsory_bytes", "flops")}
    return Census(count("full"), count("partial"), count("empty")), replace(parts[0], **added)


def predict(problem: Problem, target: Target, shape: Shape, plan: Plan, tiles: Census) -> Traffic:
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
    return Traffic(elements * size, bound * size, standard * size, compulsory, m_elements, flops, rate, target.hbm_gbs)
