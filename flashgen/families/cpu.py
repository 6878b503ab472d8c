"""The CPU family: vector lanes along the query rows, one task per tile of rows (forward) or per kv head (backward).

Problem, Target -> tile numbers. Example: ``FAMILY.lattice(problem, facts, target)[0]["block_q"] == 48`` for float32 with 64-byte vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import Constraint, Family, Launch, Sizes, Workspace, splits

if TYPE_CHECKING:
    from ..analysis import Facts
    from ..plan import Plan
    from ..problem import Problem
    from ..target import Target

HEAD_DIM_LIMIT = 576
VECTORS = (1, 2, 3, 4)  # vectors of query rows in a tile
KEYS = (8, 32, 64, 96, 128)  # keys in a tile
AMX_ROWS = {"forward": 32, "backward": 64}  # query rows in a tile of the AMX kernels; a tile register holds 16
AMX_KEYS = (64, 128)
AMX_FEATURES = {"amx_tile", "amx_bf16", "avx512dq", "avx512bw", "avx512_bf16"}
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


def _has_amx(problem: Problem, target: Target) -> bool:
    """Products on tile registers: bfloat16 with enough query rows to fill them."""
    return problem.dtype == "bfloat16" and problem.size != "few" and set(target.features) >= AMX_FEATURES


def _lattice(problem: Problem, facts: Facts, target: Target) -> list[dict[str, int]]:
    width, few = _width(problem, target), problem.size == "few" and problem.layout == "dense"
    points = [{"amx": 0, "block_q": vectors * width, "block_kv": keys} for vectors in VECTORS for keys in KEYS]
    if _has_amx(problem, target):
        points = [{"amx": 1, "block_q": AMX_ROWS[problem.which], "block_kv": keys} for keys in AMX_KEYS] + points
    return [p | {"kv_splits": 0 if few else 1} for p in points] if problem.which == "forward" else points


def _scratch_bytes(problem: Problem) -> Any:
    """The per-thread scratch and one tile of K and V, as in the kernels' ``struct Scratch``."""
    import sympy

    amx, block_q, block_kv = sympy.symbols("amx block_q block_kv")
    dims = problem.head_dim_qk + problem.head_dim_v
    if problem.which == "backward":
        vector = _real_bytes(problem) * (block_q * (2 * dims + problem.head_dim_qk + 2 * block_kv + 2) + block_kv * dims)
        tile = block_q * (6 * dims + 4 * problem.head_dim_qk + 14 * block_kv + 8) + 2 * block_kv * dims
    else:
        vector = _real_bytes(problem) * (block_q * (dims + block_kv) + block_kv * dims)
        tile = block_q * (4 * problem.head_dim_qk + 4 * problem.head_dim_v + 4 * block_kv + 256) + 2 * block_kv * dims
    return sympy.Piecewise((tile, sympy.Eq(amx, 1)), (vector, True))


def _constraints(problem: Problem, target: Target) -> list[Constraint]:
    import sympy

    amx, block_q, block_kv = sympy.symbols("amx block_q block_kv")
    found = [
        Constraint("L2 cache of one core", _scratch_bytes(problem), max(target.l2_bytes, SMALLEST_L2), "bytes"),
        Constraint("query rows of a tile in whole vectors", sympy.Mod(block_q, _width(problem, target)), 0, "left over"),
        Constraint("query rows of a tile on tile registers", amx * sympy.Abs(block_q - AMX_ROWS[problem.which]), 0, "too many or too few"),
        Constraint("keys of a tile on tile registers", amx * sympy.Mod(block_kv, 32), 0, "left over"),
        Constraint("query rows and keys of a tile", 1 - sympy.Min(block_q, block_kv), 0, "missing"),
    ]
    if problem.which == "forward":
        found += splits.constraints(problem)
        found.append(Constraint("key splits on tile registers", amx * sympy.Abs(sympy.Symbol("kv_splits") - 1), 0, "more than one"))
    return found


def _cost(problem: Problem, facts: Facts, target: Target) -> Any:
    """Clocks per pair of query row and key, from two multiply-adds and two loads of a vector a clock; on tile registers a product of two in 16 clocks."""
    import sympy

    amx, block_q, block_kv = sympy.symbols("amx block_q block_kv")
    width = _width(problem, target)
    vectors = block_q / width
    dims = (problem.head_dim_qk + problem.head_dim_v) * (1 if problem.which == "forward" else sympy.Rational(5, 2))
    many = 8 if target.vector_bytes == 64 else 4
    rows = sympy.Piecewise((8, vectors <= 1), (many, vectors <= 3), (many * 3 / 4, True))
    # A step of the depth: rows * vectors multiply-adds against rows broadcasts and vectors loads, whichever port is busier.
    step = sympy.Max(rows * vectors, rows + vectors, 8) / 2 / (rows * vectors)
    product = sympy.Piecewise((dims * 16 / sympy.Integer(16 * 16 * 32), sympy.Eq(amx, 1)), (dims * step / width, True))
    softmax = (8 + facts.score_ops * 2 + facts.mask_ops) / sympy.Integer(width)
    # Per pass over a tile: the running sums are loaded, scaled and stored once; the loops are entered anew.
    tile = (2 * problem.head_dim_v / sympy.Integer(width)) / block_kv + sympy.Piecewise((150, sympy.Eq(amx, 1)), (400, True)) / (block_q * block_kv)
    # Keys and values stream from the second-level cache or beyond; the right factor and the result of a product are to stay in the first. A tile
    # register that is loaded from the second takes several times as long.
    stream = dims * problem.dtype_bytes / block_q / sympy.Integer(48)
    resident = block_q * (max(problem.head_dim_qk, problem.head_dim_v) + block_kv) * _real_bytes(problem)
    resident = sympy.Piecewise((_scratch_bytes(problem), sympy.Eq(amx, 1)), (resident, True))
    slower = sympy.Piecewise((sympy.Rational(3, 2), sympy.Eq(amx, 1)), (sympy.Rational(1, 4), True))
    evicted = sympy.Max(0, resident - target.l1_bytes * sympy.Rational(7, 8)) / resident * product * slower
    # The last tile of a row's keys is half hidden; rows of a tile that a short call leaves empty are lost.
    hidden = 1 + block_q / sympy.Integer(1024) if facts.kv_bounded else 1
    used = sympy.Min(block_q, width) if problem.size == "few" else block_q
    return (product * hidden + softmax + tile + stream + evicted) * block_q / used


def _no_params(problem: Problem, plan: Plan) -> Sequence[tuple[str, str]]:
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
    raw_scores=lambda problem, plan: problem.which == "forward" and bool(plan.amx),
    grad_type=lambda problem: "double",
)
