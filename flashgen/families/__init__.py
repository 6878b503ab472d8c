"""Kernel families: one data record each. ``choose`` returns the first family that accepts a problem on a target.

Problem, Target -> Family. Example: ``choose(problem, target).name == "cpu"``.
Nothing here or in a family module imports sympy at module level: the warm path reads only launch rules.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..analysis import Facts
    from ..plan import Plan
    from ..problem import Problem
    from ..target import Target


@dataclass(frozen=True)
class Constraint:
    """A resource bound the tiler proves for a candidate: ``expr <= limit``, both in ``unit``.

    ``expr`` is a sympy expression in symbols named like Plan fields (``block_q``, ``block_kv``, ``stages``, ``warps`` ...).
    """

    name: str
    expr: Any
    limit: int
    unit: str


@dataclass(frozen=True)
class Workspace:
    """Device memory a launch needs beside its outputs: the ``Params`` field that points at it, its dtype and element count."""

    field: str
    dtype: str
    elements: int
    zeroed: bool
    kept: bool = False  # the kernel leaves it as it found it: one allocation serves all launches on a stream


@dataclass(frozen=True)
class TensorMap:
    """A tensor map by value in Params, over (column, row, head, batch) of one 4-d tensor of the pass; boxes of columns x rows, swizzled by the box's width."""

    field: str
    tensor: str  # "q", "k", "v", "out" ...: its address, strides and lengths are those of the call
    columns: int  # the head dim; boxes are filled with zeros beyond it
    box_columns: int
    box_rows: int
    packed: bool = False  # rows of packed sequences: boxes end where their sequence does, see fg/sm90/ptx.cuh


@dataclass(frozen=True)
class Launch:
    """One kernel of a call: entry name, grid, threads per block and dynamic shared memory."""

    entry: str
    grid: tuple[int, int, int]
    threads: int
    smem_bytes: int


@dataclass(frozen=True)
class Sizes:
    """The dynamic lengths of one call that launch rules may read."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    total_q: int
    total_k: int


@dataclass(frozen=True)
class Family:
    """A kernel family. Every member is data or a pure function; there is no inheritance between families."""

    name: str
    refuse: Callable[[Problem, Target], list[str]]  # reasons against; empty means accepted
    lattice: Callable[[Problem, Facts, Target], list[dict[str, int]]]  # candidate Plan fields, best guess first on ties
    constraints: Callable[[Problem, Target], list[Constraint]]
    cost: Callable[[Problem, Facts, Target], Any]  # sympy expression: predicted clocks per (query, key) pair; lower is better
    templates: Mapping[str, str]  # "forward" | "backward" -> path below templates/
    headers: tuple[str, ...]  # headers below templates/include the emitted file includes directly
    params: Callable[[Problem, Plan], Sequence[tuple[str, str]]]  # extra Params fields (C type, name), workspace pointers above all
    workspaces: Callable[[Problem, Plan, Sizes], list[Workspace]]
    launches: Callable[[Problem, Plan, Sizes], list[Launch]]  # empty for the cpu family
    tensor_maps: Callable[[Problem, Plan], Sequence[TensorMap]] = lambda problem, plan: ()
    derive: Callable[[str, dict[str, int]], dict[str, int]] = lambda which, fields: fields  # renews fields that follow from others, some of them forced
    lacks: tuple[str, ...] = ()  # plan fields of a forward that only the families after it have: forcing one of them is asking for those
    raw_scores: Callable[[Problem, Plan], bool] = lambda problem, plan: False  # score() is given q . k and q - k, and leaves out gain(); see rewrite.py
    gaps: bool = False  # what scores need of q - k alone is computed apart from them, see part/hooks
    clocks: Callable[[Problem, Facts], Mapping[str, Any]] = lambda problem, facts: {}  # of a tile on each unit of an SM, sympy; the matrix units first
    grad_type: Callable[[Problem], str] = lambda problem: "real"  # C type in which gradients of captured tensors are summed; see passes.captured_sums
    numbers: Callable[[Problem, Plan, Sizes], Mapping[str, int]] = lambda problem, plan, sizes: {}  # values of the extra Params fields that are no pointers
    clears: bool = False  # packed: its kernels clear the rows that belong to no sequence; else the host does


ORDER = {"cuda": ("sm90", "sm80"), "cpu": ("cpu",)}  # per kind of device, the fastest family first


def get(name: str) -> Family:
    """The record of the family called ``name`` (``"cpu"``, ``"sm80"``, ``"sm90"``)."""
    return importlib.import_module(f".{name}", __package__).FAMILY


def choose(problem: Problem, target: Target, forced: str | None = None, fields: Collection[str] = ()) -> tuple[str, dict[str, list[str]]]:
    """Name of the family that serves the problem, and the reasons against those passed over. Raises VariantError when none accepts it.

    ``fields``: names of the plan fields that are forced.
    """
    from ..errors import VariantError

    if forced is not None and forced not in ORDER[target.kind]:
        raise VariantError(f"family={forced!r}: the families for {target.name} are {', '.join(ORDER[target.kind])}.")
    passed: dict[str, list[str]] = {}
    for name in (forced,) if forced else ORDER[target.kind]:
        lacking = [field for field in get(name).lacks if field in fields and not forced and problem.which == "forward"]
        reasons = get(name).refuse(problem, target) + [f"{name} has no {field}" for field in lacking]
        if not reasons:
            return name, passed
        passed[name] = reasons
    against = "; ".join(reason for found in passed.values() for reason in found)
    remedy = "Leave family out, or choose" if forced and len(ORDER[target.kind]) > 1 else "Choose"
    raise VariantError(f"no kernel family serves this call: {against}. {remedy} another dtype, head_dim or target; cpu computes every dtype.")
