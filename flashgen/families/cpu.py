"""The CPU family: vector lanes along the query rows, one task per tile of rows (forward) or per kv head (backward).

Problem, Target -> tile numbers. Example: ``FAMILY.lattice(problem, facts, target)[0]["block_q"] == 48`` for float32 with 64-byte vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import Constraint, Family, Launch, Sizes, Workspace

if TYPE_CHECKING:
    from ..analysis import Facts
    from ..plan import Plan
    from ..problem import Problem
    from ..target import Target

HEAD_DIM_LIMIT = 576
VECTORS = (1, 2, 3, 4)  # vectors of query rows in a tile
KEYS = (8, 32, 64, 96, 128)  # keys in a tile
SMALLEST_L2 = 384 * 1024  # assumed where less is reported: the smallest tiles fit it at every head dim


def _real_bytes(problem: Problem) -> int:
    return 8 if problem.dtype == "float64" else 4


def _width(problem: Problem, target: Target) -> int:
    return (target.vector_bytes or 16) // _real_bytes(problem)


def _refuse(problem: Problem, target: Target) -> list[str]:
    reasons = []
    for name, dim in (("head_dim", problem.head_dim_qk), ("the value head_dim", problem.head_dim_v)):
        if dim > HEAD_DIM_LIMIT:
            reasons.append(f"{name}={dim}: the limit is {HEAD_DIM_LIMIT} on cpu.")
    return reasons


def _lattice(problem: Problem, facts: Facts, target: Target) -> list[dict[str, int]]:
    width = _width(problem, target)
    return [{"block_q": vectors * width, "block_kv": keys} for vectors in VECTORS for keys in KEYS]


def _scratch(problem: Problem) -> Any:
    """Elements of the per-thread scratch and of one tile of K and V, as in the kernels' ``struct Scratch``."""
    import sympy

    block_q, block_kv = sympy.symbols("block_q block_kv")
    dims = problem.head_dim_qk + problem.head_dim_v
    if problem.which == "forward":
        return block_q * (dims + block_kv) + block_kv * dims
    return block_q * (2 * dims + problem.head_dim_qk + 2 * block_kv + 2) + block_kv * dims


def _constraints(problem: Problem, target: Target) -> list[Constraint]:
    return [Constraint("L2 cache of one core", _scratch(problem) * _real_bytes(problem), max(target.l2_bytes, SMALLEST_L2), "bytes")]


def _cost(problem: Problem, facts: Facts, target: Target) -> Any:
    """Clocks per pair of query row and key, from two multiply-adds and two loads a clock."""
    import sympy

    block_q, block_kv = sympy.symbols("block_q block_kv")
    width, bytes_ = _width(problem, target), _real_bytes(problem)
    vectors = block_q / width
    dims = (problem.head_dim_qk + problem.head_dim_v) * (1 if problem.which == "forward" else sympy.Rational(5, 2))
    many = 8 if target.vector_bytes == 64 else 4
    rows = sympy.Piecewise((8, vectors <= 1), (many, vectors <= 3), (many * 3 / 4, True))
    # A step of the depth: rows * vectors multiply-adds against rows broadcasts and vectors loads, whichever port is busier.
    step = sympy.Max(rows * vectors, rows + vectors, 8) / 2 / (rows * vectors)
    product = dims * step / width
    softmax = (8 + facts.score_ops * 2 + facts.mask_ops) / width
    # Per pass over a tile: the running sums are loaded, scaled and stored once; the loops are entered anew.
    tile = (2 * problem.head_dim_v / width) / block_kv + 400 / (block_q * block_kv)
    # Tiles that leave the first-level cache are read again from the second: about a cache line every other clock.
    spill = sympy.Max(0, _scratch(problem) * bytes_ - target.l1_bytes) / sympy.Integer(32) / (block_q * block_kv)
    # Rows of a tile that a short call leaves empty.
    used = sympy.Min(block_q, width) if problem.size == "few" else block_q
    return (product + softmax + tile + spill) * block_q / used


def _no_params(problem: Problem) -> Sequence[tuple[str, str]]:
    return ()


def _no_workspaces(problem: Problem, plan: Plan, sizes: Sizes) -> list[Workspace]:
    return []


def _no_launches(problem: Problem, plan: Plan, sizes: Sizes) -> list[Launch]:
    return []


FAMILY = Family(
    name="cpu",
    refuse=_refuse,
    lattice=_lattice,
    constraints=_constraints,
    cost=_cost,
    templates={"forward": "kernel/cpu/forward.cpp.j2", "backward": "kernel/cpu/backward.cpp.j2"},
    headers=("fg/interval.h", "fg/math.h", "fg/cpu/vector.h", "fg/cpu/product.h", "fg/cpu/softmax.h", "fg/cpu/tile.h", "fg/cpu/parallel.h"),
    params=_no_params,
    workspaces=_no_workspaces,
    launches=_no_launches,
)
