"""The sm90 family's clocks: how long each unit of an SM works on a tile, and what a tile takes with all of them.

Problem, Facts -> sympy expressions in plan fields. Example: ``units(problem, facts)["matrix"].subs(block_q=128, block_kv=128)``.

A wgmma of 64 rows, n columns and a depth of 16 takes n / 2 clocks and reads 32 n bytes of its right operand through the port of shared memory (128 bytes
a clock), and 2048 of its left one unless that lies in registers; what TMA writes goes through the same port. A clock makes 16 exponentials or other
special functions and issues four instructions of a warp. Operations per pair beside the variant's own were counted in the emitted loops' machine code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .common import symbols

if TYPE_CHECKING:
    from ..analysis import Facts
    from ..problem import Problem
    from ..target import Target

PORT_BYTES = 128  # a clock
SPECIALS = 16  # a clock
RATE = 4 * 64 * 16  # multiply-adds of an SM's matrix units a clock, counted as 2
LANES = 128  # that four instructions of a warp, issued each clock, work on
WGMMA_ROWS, WGMMA_DEPTH = 64, 16
LEFT_BYTES = 2 * WGMMA_ROWS * WGMMA_DEPTH  # of a left operand in shared memory
# Instructions per pair: scale, maximum, sum, exponential, packing; and per element of the output and step of keys, for its scaling and the loop's own.
SOFTMAX_OPS, OUTPUT_OPS, GRADIENT_OPS = 6.0, 1.4, 14.0
DROPOUT_OPS = 22.0  # ten rounds of Philox for four pairs, their wide products two slots each; and a select
REDUCED_BYTES = 17.0  # float32 sums that an SM adds to L2, a clock

# What a tile takes: the busiest unit, a share of the softmax that no product covers, and waits at barriers. Fitted to head dims 64, 128 and 256 (8% off).
EXPOSED, STEP_CLOCKS = 0.5, 240.0  # the latter divided by the consumer warpgroups, which fill each other's waits
ALONE = 2.0  # a single consumer warpgroup hides less: so many times the share


def units(problem: Problem, facts: Facts) -> dict[str, Any]:
    """Clocks of a tile of block_q x block_kv on the units of an SM, "matrix" first; of a backward those of its kernel over kv tiles."""
    return _backward(problem, facts) if problem.which == "backward" else _forward(problem, facts)


def cost(problem: Problem, facts: Facts, target: Target) -> Any:
    """Of a forward, clocks per (query, key) pair."""
    import sympy

    f, found = symbols(), units(problem, facts)
    alone = sympy.Piecewise((ALONE, sympy.Eq(f["consumers"], 1)), (1, True))
    tile = sympy.Max(*found.values()) + EXPOSED * alone * found["special functions"] + STEP_CLOCKS / f["consumers"]
    return tile / (f["block_q"] * f["block_kv"])


def _forward(problem: Problem, facts: Facts) -> dict[str, Any]:
    f = symbols()
    bq, bkv, dqk, dv = f["block_q"], f["block_kv"], *_dims(problem)
    groups = bq / WGMMA_ROWS
    scores = dqk / WGMMA_DEPTH * (32 * bkv + LEFT_BYTES)
    outputs = bkv / WGMMA_DEPTH * 32 * dv  # weights come from registers
    return {
        "matrix": 2 * bq * bkv * (dqk + dv) / RATE,
        "shared-memory port": (groups * (scores + outputs) + 2 * bkv * (dqk + dv)) / PORT_BYTES,
        "special functions": bq * bkv * (1 + facts.score_specials) / SPECIALS,
        "issue slots": bq * (bkv * (SOFTMAX_OPS + facts.score_ops + DROPOUT_OPS * problem.dropout) + OUTPUT_OPS * dv) / LANES,
    }


def _backward(problem: Problem, facts: Facts) -> dict[str, Any]:
    """Of the kernel over kv tiles: keys are the rows of S^T and dP^T, whose weights come from registers for dV and dK."""
    f = symbols()
    bq, bkv, dqk, dv = f["block_q"], f["block_kv"], *_dims(problem)
    groups = bkv / WGMMA_ROWS
    scores = (dqk + dv) / WGMMA_DEPTH * (32 * bq + LEFT_BYTES)
    sums = bq / WGMMA_DEPTH * 32 * (dqk + dv)
    summed = f["dq_summed"]
    dq = summed * (bkv / WGMMA_DEPTH * bq / WGMMA_ROWS * (32 * dqk + LEFT_BYTES) + 2 * bq * bkv)  # dS is written once
    staged = summed * f["dq_staged"] * 8 * bq * dqk  # written and read
    drawn = DROPOUT_OPS * problem.dropout * (1 + f["wide"])  # of wide heads by each warpgroup
    return {
        "matrix": 2 * bq * bkv * (2 * dqk + 2 * dv + summed * dqk) / RATE,
        "shared-memory port": (groups * (scores + sums) + dq + staged + 2 * bq * (dqk + dv)) / PORT_BYTES,
        "special functions": bq * bkv * (1 + facts.score_specials) / SPECIALS,
        "issue slots": bq * bkv * (GRADIENT_OPS + 2 * facts.score_ops + drawn) / LANES,
        "additions to dQ": summed * 4 * bq * dqk / REDUCED_BYTES,
    }


def _dims(problem: Problem) -> tuple[int, int]:
    """Padded to the depth of a wgmma."""
    return tuple(-(-d // WGMMA_DEPTH) * WGMMA_DEPTH for d in (problem.head_dim_qk, problem.head_dim_v))  # type: ignore[return-value]
