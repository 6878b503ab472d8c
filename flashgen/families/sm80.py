"""The sm80 family: mma.sync, cp.async and ldmatrix, for every NVIDIA GPU from sm_80 on; forward and backward.

Problem, Facts, Target -> lattice, budgets, launches. Example: ``FAMILY.launches(problem, plan, sizes)``.
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

MAX_HEAD_DIM = 256
OVERHEAD_REGISTERS = 56  # addresses, row statistics, operand fragments; read off ptxas reports of the lattice


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def refuse(problem: Problem, target: Target) -> list[str]:
    """Reasons against this family for a call; empty means accepted."""
    reasons = []
    if target.kind != "cuda":
        reasons.append(f"sm80 needs an NVIDIA GPU, the target is {target.name}")
    if problem.dtype not in ("float16", "bfloat16"):
        reasons.append(f"sm80 computes float16 and bfloat16, not {problem.dtype}")
    if max(problem.head_dim_qk, problem.head_dim_v) > MAX_HEAD_DIM:
        reasons.append(f"sm80 takes head dims up to {MAX_HEAD_DIM}, not ({problem.head_dim_qk}, {problem.head_dim_v})")
    return reasons


def _dims(problem: Problem) -> tuple[int, int]:
    """Head dims as the kernels see them: padded to the 16 of an mma step."""
    return 16 * _ceil_div(problem.head_dim_qk, 16), 16 * _ceil_div(problem.head_dim_v, 16)


def smem_bytes(which: str, fields: dict[str, Any]) -> Any:
    """Shared memory of the main kernel of a pass, for numbers or sympy symbols: what ``sizeof(Smem)`` is in the template."""
    f = fields
    dims = f["dim_qk"] + f["dim_v"]
    if which == "forward":
        return 2 * (f["block_q"] * f["dim_most"] + f["stages"] * f["block_kv"] * dims)
    return 2 * (f["block_kv"] * dims + f["stages"] * f["block_q"] * dims + 2 * f["block_q"] * f["block_kv"]) + 8 * f["stages"] * f["block_q"]


def lattice(problem: Problem, facts: Facts, target: Target) -> list[dict[str, int]]:
    """Candidate plans, best guess first on ties."""
    dim_qk, dim_v = _dims(problem)
    common = {"dim_qk": dim_qk, "dim_v": dim_v, "dim_most": max(dim_qk, dim_v), "aligned": int(problem.aligned), "section_bytes": target.l2_bytes // 2}
    points = []
    if problem.which == "forward":
        names = ("block_q", "block_kv", "warps", "stages", "ctas", "q_in_registers")
        for values in ((128, 64, 4, 2, 2, 0), (128, 64, 4, 1, 2, 0), (64, 64, 4, 1, 2, 0), (64, 32, 4, 1, 2, 0)):
            points.append(dict(zip(names, values, strict=True)))
    else:
        names = ("block_q", "block_kv", "warps", "stages", "ctas", "score_warps_q", "key_warps", "query_warps")
        for values in ((64, 128, 8, 2, 1, 2, 4, 2), (64, 64, 8, 2, 1, 2, 2, 2), (64, 64, 4, 1, 1, 2, 2, 2)):
            points.append(dict(zip(names, values, strict=True)))
    return [derive(problem.which, {**common, **p}) for p in points]


def derive(which: str, fields: dict[str, int]) -> dict[str, int]:
    return {**fields, "smem_bytes": int(smem_bytes(which, fields))}


def constraints(problem: Problem, target: Target) -> list[Constraint]:
    import sympy

    class Symbols(dict):
        def __missing__(self, name: str) -> Any:
            return sympy.Symbol(name)

    f = Symbols()
    return [Constraint("shared memory", smem_bytes(problem.which, f), target.smem_block_bytes, "bytes")]


def cost(problem: Problem, facts: Facts, target: Target) -> Any:
    return 1


def params(problem: Problem) -> Sequence[tuple[str, str]]:
    return (("float*", "dq_sum"),) if problem.which == "backward" and problem.dq and not problem.deterministic else ()


def _q_tiles(problem: Problem, plan: Plan, sizes: Sizes) -> int:
    """q tiles of all items together: packed sequences may each leave one partly empty."""
    if problem.layout == "varlen":
        return _ceil_div(sizes.total_q, plan.block_q) + sizes.batch
    return sizes.batch * _ceil_div(sizes.q_len, plan.block_q)


def workspaces(problem: Problem, plan: Plan, sizes: Sizes) -> list[Workspace]:
    if not params(problem):
        return []
    return [Workspace("dq_sum", "float32", _q_tiles(problem, plan, sizes) * sizes.heads * plan.block_q * plan.dim_qk, zeroed=False)]


def launches(problem: Problem, plan: Plan, sizes: Sizes) -> list[Launch]:
    q_blocks = _ceil_div(sizes.q_len, plan.block_q) * sizes.batch * sizes.heads
    if problem.which == "forward":
        found = [Launch("forward", (q_blocks, 1, 1), plan.warps * 32, plan.smem_bytes)]
    else:
        kv_blocks = _ceil_div(sizes.kv_len, plan.block_kv) * sizes.batch * sizes.kv_heads
        found = [Launch("backward_prepare", (q_blocks, 1, 1), 128, 0), Launch("backward_main", (kv_blocks, 1, 1), plan.warps * 32, plan.smem_bytes)]
        if problem.dq:
            found.append(Launch("backward_finish", (q_blocks, 1, 1), 128, 0))
    return [launch for launch in found if launch.grid[0]]


FAMILY = Family(
    name="sm80",
    refuse=refuse,
    lattice=lattice,
    constraints=constraints,
    cost=cost,
    templates={"forward": "kernel/sm80/forward.cu.j2", "backward": "kernel/sm80/backward.cu.j2"},
    headers=("fg/base.h", "fg/interval.h", "fg/math.cuh", "fg/sm80/mma.cuh", "fg/sm80/schedule.cuh"),
    params=params,
    workspaces=workspaces,
    launches=launches,
)
