"""The sm80 family: mma.sync, cp.async and ldmatrix, for every NVIDIA GPU from sm_80 on; forward and backward.

Problem, Facts, Target -> lattice, budgets, launches. Example: ``FAMILY.launches(problem, plan, sizes)``.
Two kinds of kernels: tensor cores for 16-bit types, and plain multiply-adds (``simt``) for float32, whose products are exact, and for head dims beyond 256.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..plan import FEW_ROWS
from . import Constraint, Family, Launch, Sizes, Workspace, splits
from .common import arrived, ceil_div, symbols

if TYPE_CHECKING:
    from ..analysis import Facts
    from ..plan import Plan
    from ..problem import Problem
    from ..target import Target

MAX_HEAD_DIM = 576
TENSOR_HEAD_DIM = 256  # beyond it, and for float32, the kernels of plain multiply-adds
OVERHEAD_REGISTERS = 56  # addresses, row statistics, operands in flight: read off ptxas reports of the lattice
RESERVED_SMEM_BYTES = 1024  # per block, by the driver (CUDA C++ Programming Guide, "Compute Capability 8.x")
FEW_BLOCKS = 64  # before and over keys, in one launch. They run at once on chips of as many SMs, on others in the order in which they wait for each other
HOPPER_MMA_RATE = 0.62  # share of the matrix rate that mma.sync reaches from sm_90 on, where wgmma has the rest

# Candidates, best first. Forward: block_q, block_kv, warps, stages, ctas, q_in_registers. Backward: block_q, block_kv, warps, stages, ctas, score_passes.
# Passes over parts of a product and a shorter unrolling of its steps cost a little and save registers.
_FORWARD = (
    (128, 64, 4, 2, 2, 0), (128, 64, 4, 2, 2, 1), (128, 64, 4, 1, 2, 0), (128, 64, 4, 1, 2, 1), (128, 48, 4, 2, 2, 0), (128, 32, 4, 2, 3, 0),
    (128, 32, 4, 2, 2, 0), (128, 32, 4, 1, 2, 0), (128, 64, 8, 1, 1, 0), (64, 64, 4, 2, 2, 0), (64, 64, 4, 1, 2, 0), (64, 48, 4, 1, 2, 0),
    (64, 32, 4, 2, 2, 0), (64, 32, 4, 1, 2, 0), (64, 32, 4, 1, 1, 0),
)  # fmt: skip
_FORWARD_FEW = ((32, 128, 2, 2, 3, 0), (32, 64, 2, 2, 4, 0), (32, 64, 2, 2, 2, 0), (32, 64, 2, 1, 2, 0), (32, 32, 2, 1, 2, 0))
_BACKWARD = (
    (64, 128, 8, 3, 1, 1), (64, 128, 8, 2, 1, 1), (64, 128, 4, 2, 2, 2), (64, 128, 4, 2, 2, 4), (128, 128, 8, 2, 1, 1), (64, 64, 8, 2, 1, 1),
    (64, 64, 8, 1, 1, 1), (64, 64, 4, 2, 2, 2), (64, 64, 4, 2, 2, 1), (64, 64, 4, 1, 2, 2), (64, 64, 4, 1, 2, 1), (64, 64, 4, 1, 1, 1),
    (32, 64, 8, 1, 1, 1), (32, 32, 4, 1, 1, 1),
)  # fmt: skip
_BACKWARD_DQ = ((64, 64), (64, 32), (64, 16), (32, 32), (32, 16))  # dq_block_q, dq_block_kv of the kernel over q tiles


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


def _dq_by_rows(problem: Problem) -> bool:
    """dQ by a kernel of its own over q tiles: bitwise repeatable, and the cheaper way where neither dK nor dV is wanted."""
    return problem.dq and (_simt(problem) or problem.deterministic or not (problem.dk or problem.dv))


def _dq_by_atomics(problem: Problem) -> bool:
    """dQ by additions of all blocks over keys in float32, rounded by a kernel after them."""
    return problem.dq and not _dq_by_rows(problem)


def _dims(problem: Problem) -> tuple[int, int]:
    """Head dims as the kernels see them: padded to the 16 of an mma step (above 128 the backward shares columns among warps: 32)."""

    def pad(dim: int) -> int:
        step = 32 if problem.which == "backward" and dim > 128 else 16
        return step * ceil_div(dim, step)

    return pad(problem.head_dim_qk), pad(problem.head_dim_v)


# ---- budgets: for numbers or sympy symbols ---------------------------------------------------------------------------------------------------


def smem_bytes(which: str, f: dict[str, Any]) -> Any:
    """Shared memory of the main kernel of a pass: what ``sizeof(Smem)`` is in the template."""
    dims = f["dim_qk"] + f["dim_v"]
    if which == "forward":
        return 2 * (f["block_q"] * f["dim_most"] + f["stages"] * f["block_kv"] * dims) + 128 * (f["warps"] + 1)
    return (
        2 * (f["block_kv"] * dims + f["stages"] * f["block_q"] * dims + 2 * f["buffers"] * f["block_q"] * f["block_kv"]) + 8 * f["stages"] * f["block_q"] + 128
    )


def dq_smem_bytes(f: dict[str, Any]) -> Any:
    """The same for backward_dq, the kernel over q tiles."""
    return 2 * (f["dq_block_q"] + f["dq_block_kv"]) * (f["dim_qk"] + f["dim_v"])


def _registers(which: str, f: dict[str, Any], largest: Any) -> Any:
    """Registers of a thread: accumulators, operands kept over the loop, and an allowance for the rest."""
    threads = 32 * f["warps"]
    if which == "forward":
        return (f["block_q"] * (f["dim_v"] + f["block_kv"]) + f["q_in_registers"] * f["block_q"] * f["dim_qk"] / 2) / threads + OVERHEAD_REGISTERS
    sums = f["block_kv"] * (f["dim_qk"] + f["dim_v"])
    return (sums + largest(2 * f["block_q"] * f["block_kv"] / f["score_passes"], f["block_q"] * f["dim_qk"] / f["dq_passes"])) / threads + OVERHEAD_REGISTERS


def constraints(problem: Problem, target: Target) -> list[Constraint]:
    """What a candidate must fit, the blocks that share a multiprocessor included."""
    import sympy

    f = symbols()
    splitting = splits.constraints(problem) if problem.which == "forward" else []
    if _simt(problem):
        return [Constraint("shared memory", f["smem_bytes"], target.smem_block_bytes, "bytes"), *splitting]
    used, registers = smem_bytes(problem.which, f), _registers(problem.which, f, sympy.Max)
    found = [
        Constraint("shared memory", used, target.smem_block_bytes, "bytes"),
        Constraint("shared memory of an SM", f["ctas"] * (used + RESERVED_SMEM_BYTES), target.smem_sm_bytes, "bytes"),
        Constraint("registers of a thread", registers, 255, "registers"),
        Constraint("registers of an SM", f["ctas"] * 32 * f["warps"] * registers, target.registers_sm, "registers"),
        *splitting,
    ]
    if problem.which == "backward" and _dq_by_rows(problem):
        found.append(Constraint("shared memory of dq", dq_smem_bytes(f), target.smem_block_bytes, "bytes"))
    return found


# ---- lattice and cost ------------------------------------------------------------------------------------------------------------------------


def lattice(problem: Problem, facts: Facts, target: Target) -> list[dict[str, int]]:
    """Candidate plans, best guess first on ties."""
    section = {"section_bytes": target.l2_bytes // 2}  # keys and values of the heads that run together stay within half of L2
    if _simt(problem):
        return [_simt_plan(problem) | section | (splits.fields(problem, target) if problem.which == "forward" else {})]
    dim_qk, dim_v = _dims(problem)
    common = {"simt": 0, "dim_qk": dim_qk, "dim_v": dim_v, "dim_most": max(dim_qk, dim_v), "aligned": int(problem.aligned), **section}
    points: list[dict[str, int]] = []
    if problem.which == "forward":
        steps, common = dim_qk // 16, common | splits.fields(problem, target)
        for block_q, block_kv, warps, stages, ctas, q_in_registers in _FORWARD_FEW + _FORWARD if problem.size == "few" else _FORWARD:
            tile = {"block_q": block_q, "block_kv": block_kv, "warps": warps, "stages": stages, "ctas": ctas, "q_in_registers": q_in_registers}
            shorter = steps > 4 and steps % 4 == 0 and not q_in_registers
            points += [common | tile | {"unroll": unroll} for unroll in ((steps, 4) if shorter else (steps,))]
    else:
        by_rows: list[dict[str, int]] = [{}]
        if _dq_by_rows(problem):  # the next where one spills
            fitting = [b for b in _BACKWARD_DQ if 2 * sum(b) * (dim_qk + dim_v) <= target.smem_block_bytes] or [_BACKWARD_DQ[-1]]
            by_rows = [{"dq_block_q": block_q, "dq_block_kv": block_kv} for block_q, block_kv in fitting[:3]]
        unroll = 4 if dim_qk % 64 == dim_v % 64 == 0 else max(dim_qk, dim_v) // 16
        for block_q, block_kv, warps, stages, ctas, passes in _BACKWARD:
            grids = _backward_warps(block_q, block_kv, warps, passes, dim_qk, dim_v)
            if grids:
                dq_passes = 2 if block_q * dim_qk > 32 * 32 * warps and dim_qk % (32 * warps // grids["query_warps"]) == 0 else 1
                tile = {"block_q": block_q, "block_kv": block_kv, "warps": warps, "stages": stages, "ctas": ctas}
                points += [common | tile | grids | rows | {"score_passes": passes, "dq_passes": dq_passes, "unroll": unroll} for rows in by_rows]
    return [derive(problem.which, p) for p in points]


def derive(which: str, fields: dict[str, int]) -> dict[str, int]:
    """The fields that follow from others, entered or renewed."""
    if fields["simt"]:
        return fields
    found = fields | ({"buffers": 2 if fields["stages"] == 3 else 1} if which == "backward" else {})
    found["smem_bytes"] = smem_bytes(which, found)
    if "dq_block_q" in found:
        found["dq_smem_bytes"] = dq_smem_bytes(found)
    return found


def _simt_plan(problem: Problem) -> dict[str, int]:
    """Tiles of 64 x 64, 256 threads. The backward's dK and dV, 16 registers for 64 columns, are shared out among `splits` blocks where they do not fit one."""
    tile, operands = 4 * 64 * 68, 2 * 4 * 64 * 36
    point = {"simt": 1, "block_q": 64, "block_kv": 64, "warps": 8}
    if problem.which == "forward":
        return point | {"smem_bytes": operands + tile}
    chunks = ceil_div(problem.head_dim_qk, 64) + ceil_div(problem.head_dim_v, 64)
    splits = ceil_div(chunks, 8)
    return point | {"splits": splits, "columns": ceil_div(chunks, splits), "smem_bytes": operands + 2 * tile}


def _backward_warps(block_q: int, block_kv: int, warps: int, passes: int, dim_qk: int, dim_v: int) -> dict[str, int]:
    """How the warps share the backward's products: in parts as square as the 16 x 16 steps allow. Empty if they do not divide."""

    def split(rows: int, columns: tuple[int, ...], prefer: int) -> int:
        """Warps along the rows; of equally square parts the taller (prefer 1) or the wider (-1), as timed."""
        fits = [n for n in (1, 2, 4, 8) if n <= warps and rows % (16 * n) == 0 and all(c % (16 * (warps // n)) == 0 for c in columns)]
        return min(fits, key=lambda n: (rows // n + columns[0] * n // warps, prefer * n), default=0)

    found = {
        "score_warps_q": split(block_q, (block_kv // passes,), 1),
        "key_warps": split(block_kv, (dim_qk, dim_v), -1),
        "query_warps": split(block_q, (dim_qk,), -1),
    }
    return found if all(found.values()) else {}


def cost(problem: Problem, facts: Facts, target: Target) -> Any:
    """Clocks of an SM per (query, key) pair: a fit over 60 plans timed on an H200 (head dims 64, 128, 256; 5% off), in the chip's own matrix rate."""
    import sympy

    f, largest, smallest = symbols(), sympy.Max, sympy.Min
    if _simt(problem):
        return sympy.Integer(1)
    dqk, dv = _dims(problem)
    bq, bkv, warps, ctas = (f[n] for n in ("block_q", "block_kv", "warps", "ctas"))
    rate = target.tensor_tflops * 1e6 / (target.sms * target.clock_mhz) * (HOPPER_MMA_RATE if target.name in ("sm90a", "sm100") else 1.0)
    work = 1 / 16 + (facts.score_ops if facts is not None else 0) / 128  # one exponential, and the score function's operations
    if problem.which == "forward":
        mma = 2 * (dqk + dv) / rate
        smem = (2 * (dqk + dv) * (warps + 1) / bq + 2 * (1 - f["q_in_registers"]) * dqk / bkv) / 128  # every warp reads all keys and values
        bound, waits = largest(mma, smem), 136 * (3 - f["stages"]) / (bq * bkv * ctas) + 28 * warps / (bq * bkv)
        total = (0.06 + 2.62 / (ctas * warps) + 0.186 / ctas) * bound + 0.70 * smallest(mma, smem) + 0.58 * work + waits
        total = total * (1.05 - 0.8 * f["unroll"] / dqk)  # half an unrolling costs 2.5%
        return total * bq / FEW_ROWS if problem.size == "few" else total
    by_atomics = 0 if _dq_by_rows(problem) else 1
    mma = (4 * dqk + 2 * dv + 2 * by_atomics * dqk + 2 * dv) / rate
    score_k, key_d, query_d = warps / f["score_warps_q"], warps / f["key_warps"], warps / f["query_warps"]
    scores = (score_k * f["score_passes"] * bq + f["score_warps_q"] * bkv) * (dqk + dv)  # elements that ldmatrix reads: each warp its rows and its columns
    sums = 2 * key_d * bkv * bq + f["key_warps"] * bq * (dqk + dv) + by_atomics * (query_d * bq * bkv + f["query_warps"] * bkv * dqk)
    smem = 2 * (scores + sums + 2 * bq * bkv + bq * (dqk + dv)) / (bq * bkv * 128)
    bound, barriers = largest(mma, smem), 4 - f["stages"]
    return (0.44 + 0.42 / ctas) * bound + 0.46 * smallest(mma, smem) + 0.88 * work + 122 * barriers / (bq * bkv * ctas) + by_atomics * 0.123 * dqk / bkv


# ---- launching -------------------------------------------------------------------------------------------------------------------------------


def params(problem: Problem, plan: Plan) -> Sequence[tuple[str, str]]:
    """Backward: the float32 sum of dQ that blocks add to, and what they wait by until it is cleared, or complete. Forward: what splits of the keys leave to be
    combined."""
    if problem.which == "forward":
        return splits.params(problem) if plan.kv_splits != 1 else ()
    if not _dq_by_atomics(problem):
        return ()
    return (("float*", "dq_sum"), ("int*", "arrived"), ("int", "prepare_blocks")) if problem.layout == "dense" else (("float*", "dq_sum"),)


def _q_blocks(plan: Plan, sizes: Sizes) -> int:
    return ceil_div(sizes.q_len, plan.block_q) * sizes.batch * sizes.heads


def _kv_blocks(plan: Plan, sizes: Sizes) -> int:
    return ceil_div(sizes.kv_len, plan.block_kv) * sizes.batch * sizes.kv_heads


def numbers(problem: Problem, plan: Plan, sizes: Sizes) -> dict[str, int]:
    """Splits of the keys. Backward: the blocks of backward_prepare that come first in backward_main; 0 where it is a launch of its own."""
    q_blocks = _q_blocks(plan, sizes)
    if problem.which == "forward":
        return {"splits": splits.count(plan, sizes, q_blocks)} if plan.kv_splits != 1 else {}
    if not _dq_by_atomics(problem) or problem.layout != "dense":
        return {}
    return {"prepare_blocks": q_blocks if q_blocks + _kv_blocks(plan, sizes) <= FEW_BLOCKS else 0}


def workspaces(problem: Problem, plan: Plan, sizes: Sizes) -> list[Workspace]:
    """One float32 copy of dQ in whole tiles; packed sequences may each leave one partly empty. backward_prepare clears it."""
    if not params(problem, plan):
        return []
    if problem.which == "forward":
        return splits.workspaces(problem, sizes, numbers(problem, plan, sizes)["splits"])
    varlen = problem.layout == "varlen"
    tiles = ceil_div(sizes.total_q, plan.block_q) + sizes.batch if varlen else sizes.batch * ceil_div(sizes.q_len, plan.block_q)
    found = [Workspace("dq_sum", "float32", tiles * sizes.heads * plan.block_q * plan.dim_qk, zeroed=False)]
    return found if varlen else [*found, arrived(numbers(problem, plan, sizes)["prepare_blocks"] > 0)]


def launches(problem: Problem, plan: Plan, sizes: Sizes) -> list[Launch]:
    """The kernels of a call in order; grids are one-dimensional, so that batch * heads may exceed 65,535."""

    def q_blocks(block_q: int) -> tuple[int, int, int]:
        return ceil_div(sizes.q_len, block_q) * sizes.batch * sizes.heads, 1, 1

    if problem.which == "forward":
        count = numbers(problem, plan, sizes).get("splits", 1)
        found = [Launch("forward", (_q_blocks(plan, sizes) * count, 1, 1), plan.warps * 32, plan.smem_bytes)]
        if plan.kv_splits != 1:
            found.append(Launch("combine", (ceil_div(sizes.batch * sizes.heads * sizes.q_len, 4), 1, 1), 128, 0))
        return found
    by_rows, by_atomics = _dq_by_rows(problem), _dq_by_atomics(problem)
    kv_blocks = _kv_blocks(plan, sizes) * (plan.splits if plan.simt else 1)
    first = numbers(problem, plan, sizes).get("prepare_blocks", 0)
    last = first if problem.size != "long" else 0  # blocks of backward_finish
    found = [] if first else [Launch("backward_prepare", q_blocks(plan.block_q), 128, 0)]
    if problem.dk or problem.dv or by_atomics or problem.capture_grads:
        found.append(Launch("backward_main", (first + kv_blocks + last, 1, 1), plan.warps * 32, plan.smem_bytes))
    if by_rows:
        block_q, smem = (plan.block_q, plan.smem_bytes) if plan.simt else (plan.dq_block_q, plan.dq_smem_bytes)
        found.append(Launch("backward_dq", q_blocks(block_q), plan.warps * 32 if plan.simt else block_q * 2, smem))
    if by_atomics and not last:
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
    numbers=numbers,
    launches=launches,
    derive=derive,
    grad_type=lambda problem: "fg::ExactSum" if problem.deterministic else "real",
)
