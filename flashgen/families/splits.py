"""Splits: the keys of a row tile shared out among several blocks, where the rows alone do not fill the machine.

A plan's ``kv_splits`` is their number; 0 means as many as fill the machine, decided at each call. Their partial results are float32 workspaces
that a second kernel combines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import Constraint, Workspace

if TYPE_CHECKING:
    from ..plan import Plan
    from ..problem import Problem
    from ..target import Target
    from . import Sizes

BLOCKS_PER_SM = 2  # enough to hide the latency of loads
MOST_SPLITS = 1 << 16  # that can be forced
FEWEST_TILES = 2  # of keys that are worth a block of their own


def fields(problem: Problem, target: Target) -> dict[str, int]:
    """Plan fields of a forward: calls of few rows split their keys, others only if ``kv_splits`` is forced."""
    return {"kv_splits": 0, "sms": target.sms} if problem.size == "few" and problem.layout == "dense" else {"kv_splits": 1}


def constraints(problem: Problem) -> list[Constraint]:
    import sympy

    splits = sympy.Symbol("kv_splits")
    if problem.layout != "dense":
        return [Constraint("key splits of packed sequences", sympy.Abs(splits - 1), 0, "other than one")]
    least = 0 if problem.size == "few" else 1
    return [Constraint("key splits", least - splits, 0, "missing"), Constraint("key splits", sympy.Max(0, splits - MOST_SPLITS), 0, "too many")]


def count(plan: Plan, sizes: Sizes, blocks: int) -> int:
    """Splits of a call whose rows make ``blocks`` blocks."""
    if plan.kv_splits:
        return plan.kv_splits
    worthwhile = -(-sizes.kv_len // (FEWEST_TILES * plan.block_kv))
    return max(1, min(BLOCKS_PER_SM * plan.sms // max(blocks, 1), worthwhile))


def params(problem: Problem) -> tuple[tuple[str, str], ...]:
    largest = (("float*", "partial_max"),) if problem.max_scores else ()
    return (("float*", "partial_out"), ("float*", "partial_lse"), *largest, ("int", "splits"))


def workspaces(problem: Problem, sizes: Sizes, splits: int) -> list[Workspace]:
    rows = splits * sizes.batch * sizes.heads * sizes.q_len
    elements: dict[str, Any] = {"partial_out": rows * problem.head_dim_v, "partial_lse": rows, "partial_max": rows}
    return [Workspace(name, "float32", elements[name], zeroed=False) for ctype, name in params(problem) if ctype.endswith("*")]
