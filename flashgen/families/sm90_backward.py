"""The sm90 family's backward: lattice, budgets, launches and tensor maps of its kernels.

Problem, Facts, Target -> candidate plans. Example: ``launches(problem, plan, sizes)[1].entry == "backward_main"``. ``sm90.FAMILY`` refers to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import Constraint, Launch, Sizes, TensorMap, Workspace

if TYPE_CHECKING:
    from ..analysis import Facts
    from ..plan import Plan
    from ..problem import Problem
    from ..target import Target

MAX_HEAD_DIM = 128
BLOCK_KV = 128  # keys of a block: 64 for each of the two consumer warpgroups
BOX_ROWS = 64  # of every tensor map, see fg/sm90/backward.cuh
REGISTERS = ((240, 24), (232, 40), (224, 56), (216, 72), (200, 104))  # a consumer's and the producer's; two and one of them are the 504 of a launch
OVERHEAD_REGISTERS = 24  # descriptors, indices, keys of a consumer thread; read off ptxas reports


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def refuse(problem: Problem) -> list[str]:
    """Reasons against a backward beside those of the forward; empty means accepted."""
    reasons = []
    if max(problem.head_dim_qk, problem.head_dim_v) > MAX_HEAD_DIM:
        reasons.append(f"sm90's backward takes head dims up to {MAX_HEAD_DIM}, not ({problem.head_dim_qk}, {problem.head_dim_v})")
    if problem.head_dim_qk % 8 or problem.head_dim_v % 8:
        reasons.append(f"sm90's backward takes head dims that are multiples of 8, not ({problem.head_dim_qk}, {problem.head_dim_v})")
    if problem.deterministic and problem.dq:
        reasons.append("sm90's backward adds up dQ in any order: it is not deterministic")
    return reasons


def _dq_summed(problem: Problem) -> bool:
    """dQ by additions of all blocks over keys in float32."""
    return problem.dq


def _columns(dim: int) -> int:
    """Width of a tile's blocks: the widest swizzle, 128, 64 or 32 bytes, that divides the padded head dim, or the part of it that a warpgroup computes."""
    return next(columns for columns in (64, 32, 16) if dim % columns == 0)


def smem_bytes(f: dict[str, Any], ceiling: Any) -> Any:
    """Shared memory of backward_main, for numbers or sympy symbols: ``sizeof(Smem)`` of the template, whose alignment is 1024."""
    tiles = (f["block_kv"] + f["stages"] * f["block_q"]) * (f["dim_qk"] + f["dim_v"]) + f["dq_summed"] * f["stages"] * f["block_q"] * f["block_kv"]
    staged = f["dq_summed"] * f["dq_staged"] * 4 * f["block_q"] * f["dim_qk"]
    rest = f["stages"] * (8 * f["block_q"] + 32 + 12) + 16 + 16
    return 1024 * ceiling((2 * tiles + staged + rest) / 1024)


def _consumer_registers(f: dict[str, Any], largest: Any) -> Any:
    """What a consumer thread needs: dK, dV, and scores with dP or their packed halves with dQ."""
    return f["dk_registers"] + f["dv_registers"] + largest(2 * f["score_registers"], f["score_registers"] + f["dq_registers"]) + OVERHEAD_REGISTERS


def lattice(problem: Problem, facts: Facts, target: Target) -> list[dict[str, int]]:
    """Candidate plans, best guess first on ties. Half as many rows a step leave room for a score function's values."""
    overlap = int(facts.score_affine and not problem.capture_grads)
    common = {
        "block_kv": BLOCK_KV, "stages": 2, "overlap": overlap, "dq_summed": int(_dq_summed(problem)), "dq_by_rows": 0,
        "section_bytes": target.l2_bytes * 4 // 5 if facts.has_mask else 0,
    }  # fmt: skip
    registers = REGISTERS[4:] if facts.data_dependent else REGISTERS
    points = []
    for block_q in (128, 64):
        step = 16 if block_q == 128 else 32  # two warpgroups share the columns of dQ's 64 rows
        dim_qk, dim_v = step * _ceil_div(problem.head_dim_qk, step), 16 * _ceil_div(problem.head_dim_v, 16)
        dq_columns = dim_qk if block_q == 128 else dim_qk // 2
        tile = {
            "block_q": block_q, "dim_qk": dim_qk, "dim_v": dim_v, "columns_qk": _columns(dq_columns), "columns_v": _columns(dim_v), "dq_columns": dq_columns,
        }  # fmt: skip
        for dq_staged in (1, 0):
            for consumer, producer in registers:
                points.append(derive({**common, **tile, "dq_staged": dq_staged, "consumer_registers": consumer, "producer_registers": producer}))
    return points


def derive(fields: dict[str, int]) -> dict[str, int]:
    """Fields that follow from others."""
    halves = {"score_registers": "block_q", "dk_registers": "dim_qk", "dv_registers": "dim_v", "dq_registers": "dq_columns"}
    found = {**fields, **{name: fields[of] // 2 for name, of in halves.items()}}
    return {**found, "smem_bytes": int(smem_bytes(found, lambda x: -int(-x // 1)))}


def constraints(problem: Problem, target: Target) -> list[Constraint]:
    """Shared memory of a block; registers of a consumer thread."""
    import sympy

    class Symbols(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            return sympy.Symbol(name)

    f = Symbols()
    return [
        Constraint("shared memory", smem_bytes(f, sympy.ceiling), target.smem_block_bytes, "bytes"),
        Constraint("registers of a consumer beyond its share", _consumer_registers(f, sympy.Max) - f["consumer_registers"], 0, "registers"),
    ]


def cost(problem: Problem, facts: Facts, target: Target) -> Any:
    return 1


def params(problem: Problem) -> Sequence[tuple[str, str]]:
    """Tensor maps, the statistics of rows in whole tiles, the float32 sum of dQ, and the amount of work (see ``numbers``)."""
    maps = [("fg::TensorMap", f"map_{name}") for name in _mapped(problem)]
    sums = [("float*", "dq_sum")] if _dq_summed(problem) else []
    return (*maps, ("float*", "statistics"), *sums, *(("int", name) for name in ("q_tiles", "kv_tiles", "section")))


def _mapped(problem: Problem) -> list[str]:
    """The tensors that are loaded or stored by TMA."""
    return ["q", "k", "v", "dout", *(name for name in ("dk", "dv") if getattr(problem, name))]


def tensor_maps(problem: Problem, plan: Plan) -> Sequence[TensorMap]:
    """Boxes of 64 rows by one block of columns."""
    qk, v = (problem.head_dim_qk, plan.columns_qk, BOX_ROWS), (problem.head_dim_v, plan.columns_v, BOX_ROWS)
    return tuple(TensorMap(f"map_{name}", name, *(qk if name in ("q", "k", "dk") else v)) for name in _mapped(problem))


def numbers(problem: Problem, plan: Plan, sizes: Sizes) -> dict[str, int]:
    """Tiles of a head's rows and keys, and the kv heads of a section, whose queries, dO and sums of dQ stay in L2 together."""
    heads = sizes.batch * sizes.kv_heads
    bytes_per_head = max(problem.group * sizes.q_len * (6 * plan.dim_qk + 2 * plan.dim_v), 1)
    section = max(min(plan.section_bytes // bytes_per_head, heads), 1)
    return {"q_tiles": _ceil_div(sizes.q_len, plan.block_q), "kv_tiles": _ceil_div(sizes.kv_len, plan.block_kv), "section": section}


def workspaces(problem: Problem, plan: Plan, sizes: Sizes) -> list[Workspace]:
    """Lse and delta of every row, and one float32 copy of dQ, in whole tiles. backward_prepare writes and clears them."""
    rows = sizes.batch * sizes.heads * _ceil_div(sizes.q_len, plan.block_q) * plan.block_q
    found = [Workspace("statistics", "float32", 2 * rows, zeroed=False)]
    return found + ([Workspace("dq_sum", "float32", rows * plan.dim_qk, zeroed=False)] if _dq_summed(problem) else [])


def launches(problem: Problem, plan: Plan, sizes: Sizes) -> list[Launch]:
    """The kernels of a call in order."""
    tiles = numbers(problem, plan, sizes)
    q_blocks, kv_blocks = (tiles["q_tiles"] * sizes.batch * sizes.heads, 1, 1), (tiles["kv_tiles"] * sizes.batch * sizes.kv_heads, 1, 1)
    found = [Launch("backward_prepare", q_blocks, 256, 0)]
    if problem.dk or problem.dv or _dq_summed(problem) or problem.capture_grads:
        found.append(Launch("backward_main", kv_blocks, 384, plan.smem_bytes))
    if _dq_summed(problem):
        found.append(Launch("backward_finish", q_blocks, 256, 0))
    return found
