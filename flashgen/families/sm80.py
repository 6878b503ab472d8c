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

MAX_HEAD_DIM = 576
TENSOR_HEAD_DIM = 256  # beyond it, and for float32, the kernels of plain multiply-adds
OVERHEAD_REGISTERS = 56  # addresses, row statistics, operand fragments; read off ptxas reports of the lattice


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def refuse(problem: Problem, target: Target) -> list[str]:
    """Reasons against this family for a call; empty means accepted."""
    reasons = []
    if target.kind != "cuda":
        reasons.append(f"sm80 needs an NVIDIA GPU, the target is {target.name}")
    if problem.dtype not in ("float16", "bfloat16", "float32"):
        reasons.append(f"sm80 computes float16, bfloat16 and float32, not {problem.dtype}")
    if max(problem.head_dim_qk, problem.head_dim_v) > MAX_HEAD_DIM:
        reasons.append(f"sm80 takes head dims up to {MAX_HEAD_DIM}, not ({problem.head_dim_qk}, {problem.head_dim_v})")
    return reasons


def _simt(problem: Problem) -> bool:
    """Plain multiply-adds: exact products of float32, and the head dims for which no tile of 16-bit operands fits."""
    return problem.dtype_bytes == 4 or max(problem.head_dim_qk, problem.head_dim_v) > TENSOR_HEAD_DIM


def _dims(problem: Problem) -> tuple[int, int]:
    """Head dims as the kernels see them: padded to the 16 of an mma step (above 128 the backward shares columns among warps: 32)."""

    def pad(dim: int) -> int:
        step = 32 if problem.which == "backward" and dim > 128 else 16
        return step * _ceil_div(dim, step)

    return pad(problem.head_dim_qk), pad(problem.head_dim_v)


def smem_bytes(which: str, fields: dict[str, Any]) -> Any:
    """Shared memory of the main kernel of a pass, for numbers or sympy symbols: what ``sizeof(Smem)`` is in the template."""
    f = fields
    dims = f["dim_qk"] + f["dim_v"]
    if which == "forward":
        return 2 * (f["block_q"] * f["dim_most"] + f["stages"] * f["block_kv"] * dims)
    return 2 * (f["block_kv"] * dims + f["stages"] * f["block_q"] * dims + 2 * f["buffers"] * f["block_q"] * f["block_kv"]) + 8 * f["stages"] * f["block_q"]


def dq_smem_bytes(fields: dict[str, Any]) -> Any:
    """The same for backward_dq, the kernel over q tiles."""
    f = fields
    return 2 * (f["dq_block_q"] + f["dq_block_kv"]) * (f["dim_qk"] + f["dim_v"])


def lattice(problem: Problem, facts: Facts, target: Target) -> list[dict[str, int]]:
    """Candidate plans, best guess first on ties."""
    if _simt(problem):
        return [_simt_plan(problem, target)]
    dim_qk, dim_v = _dims(problem)
    common = {"dim_qk": dim_qk, "dim_v": dim_v, "dim_most": max(dim_qk, dim_v), "simt": 0, "aligned": int(problem.aligned), "section_bytes": target.l2_bytes // 2}
    points = []
    if problem.which == "forward":
        names = ("block_q", "block_kv", "warps", "stages", "ctas", "q_in_registers", "unroll")
        for values in ((128, 64, 4, 2, 2, 0, 4), (128, 64, 4, 1, 2, 0, 4), (64, 64, 4, 1, 2, 0, 4), (64, 32, 4, 1, 2, 0, 4)):
            points.append(dict(zip(names, values, strict=True)))
    else:
        for block_q, block_kv, warps, stages, ctas in ((64, 128, 8, 2, 1), (128, 128, 8, 2, 1), (64, 64, 8, 2, 1), (64, 64, 4, 2, 1), (64, 64, 4, 1, 1)):
            grids = _backward_warps(block_q, block_kv, warps, dim_qk, dim_v)
            if grids:
                point = {"block_q": block_q, "block_kv": block_kv, "warps": warps, "stages": stages, "ctas": ctas, "score_passes": 1, **grids}
                points.append(point | ({"dq_block_q": 64, "dq_block_kv": 64} if _dq_by_rows(problem) else {}))
    return [derive(problem.which, {**common, **p}) for p in points]


def _simt_plan(problem: Problem, target: Target) -> dict[str, int]:
    """Tiles of 64 x 64, 256 threads. The backward's dK and dV, 16 registers for 64 columns, are shared out among `splits` blocks where they do not fit one."""
    tile, operands = 4 * 64 * 68, 2 * 4 * 64 * 36
    point = {"simt": 1, "block_q": 64, "block_kv": 64, "warps": 8, "section_bytes": target.l2_bytes // 2}
    if problem.which == "forward":
        return point | {"smem_bytes": operands + tile}
    chunks = _ceil_div(problem.head_dim_qk, 64) + _ceil_div(problem.head_dim_v, 64)
    splits = _ceil_div(chunks, 8)
    return point | {"splits": splits, "columns": _ceil_div(chunks, splits), "smem_bytes": operands + 2 * tile}


def _backward_warps(block_q: int, block_kv: int, warps: int, dim_qk: int, dim_v: int) -> dict[str, int]:
    """How the warps share the backward's products: as square parts as the 16 x 16 steps allow. Empty if they do not divide."""

    def split(rows: int, columns: tuple[int, ...]) -> int:
        fits = [n for n in (1, 2, 4, 8) if n <= warps and rows % (16 * n) == 0 and all(c % (16 * (warps // n)) == 0 for c in columns)]
        return min(fits, key=lambda n: rows // n + columns[0] * n // warps, default=0)

    found = {"score_warps_q": split(block_q, (block_kv,)), "key_warps": split(block_kv, (dim_qk, dim_v)), "query_warps": split(block_q, (dim_qk,))}
    return found if all(found.values()) else {}


def derive(which: str, fields: dict[str, int]) -> dict[str, int]:
    """Fields that follow from others."""
    if fields["simt"]:
        return fields
    found = dict(fields)
    if which == "backward":
        found["buffers"] = 2 if fields["stages"] == 3 else 1
    found["smem_bytes"] = int(smem_bytes(which, found))
    if "dq_block_q" in fields:
        found["dq_smem_bytes"] = int(dq_smem_bytes(fields))
    return found


def constraints(problem: Problem, target: Target) -> list[Constraint]:
    import sympy

    class Symbols(dict):
        def __missing__(self, name: str) -> Any:
            return sympy.Symbol(name)

    f = Symbols()
    if _simt(problem):
        return [Constraint("shared memory", f["smem_bytes"], target.smem_block_bytes, "bytes")]
    return [Constraint("shared memory", smem_bytes(problem.which, f), target.smem_block_bytes, "bytes")]


def cost(problem: Problem, facts: Facts, target: Target) -> Any:
    return 1


def _dq_by_rows(problem: Problem) -> bool:
    """dQ by a kernel of its own over q tiles: bitwise repeatable, and the cheaper way where neither dK nor dV is wanted."""
    return problem.dq and (_simt(problem) or problem.deterministic or not (problem.dk or problem.dv))


def params(problem: Problem) -> Sequence[tuple[str, str]]:
    """The float32 sum of dQ that blocks add to."""
    return (("float*", "dq_sum"),) if problem.which == "backward" and problem.dq and not _dq_by_rows(problem) else ()


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
    """The kernels of a call in order; grids are one-dimensional, so that batch * heads may exceed 65,535."""

    def q_blocks(block_q: int) -> tuple[int, int, int]:
        return _ceil_div(sizes.q_len, block_q) * sizes.batch * sizes.heads, 1, 1

    if problem.which == "forward":
        return [Launch("forward", q_blocks(plan.block_q), plan.warps * 32, plan.smem_bytes)]
    by_rows = _dq_by_rows(problem)
    by_atomics = problem.dq and not by_rows
    kv_blocks = _ceil_div(sizes.kv_len, plan.block_kv) * sizes.batch * sizes.kv_heads * (plan.splits if plan.simt else 1)
    found = [Launch("backward_prepare", q_blocks(plan.block_q), 128, 0)]
    if problem.dk or problem.dv or by_atomics or problem.capture_grads:
        found.append(Launch("backward_main", (kv_blocks, 1, 1), plan.warps * 32, plan.smem_bytes))
    if by_rows:
        block_q, smem = (plan.block_q, plan.smem_bytes) if plan.simt else (plan.dq_block_q, plan.dq_smem_bytes)
        found.append(Launch("backward_dq", q_blocks(block_q), plan.warps * 32 if plan.simt else block_q * 2, smem))
    if by_atomics:
        found.append(Launch("backward_finish", q_blocks(plan.block_q), 128, 0))
    return found


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
