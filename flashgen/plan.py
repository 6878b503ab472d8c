"""Plan: tile sizes, stages, warps and the like, chosen by the tiler and proven to fit before anything compiles.

Facts, Problem, Target -> Plan. Example: ``plan(facts, problem, target).block_q``. The budgets and costs are sympy expressions of the family records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Any

from . import families
from .errors import VariantError
from .problem import Problem
from .target import Target

if TYPE_CHECKING:
    from .analysis import Facts

FEW_ROWS = 16  # query rows up to which a call counts as decoding
SHORT_KEYS = 1024  # keys up to which prologue and tail dominate


def size_class(q_len: int, kv_len: int) -> str:
    """ "few" | "short" | "long": within a class a new length never recompiles."""
    return "few" if q_len <= FEW_ROWS else "short" if kv_len <= SHORT_KEYS else "long"


@dataclass(frozen=True)
class Plan:
    """The numbers a kernel is built with. ``family`` names the record; ``fields`` are its tile numbers, printed as constexprs."""

    family: str
    which: str
    fields: tuple[tuple[str, int], ...]  # sorted by name: block_q, block_kv, stages, warps ...

    def __getattr__(self, name: str) -> int:
        for key, value in object.__getattribute__(self, "fields"):
            if key == name:
                return value
        raise AttributeError(name)

    def as_dict(self) -> dict[str, int]:
        return dict(self.fields)

    def __str__(self) -> str:
        return f"{self.family} {self.which}: " + ", ".join(f"{name}={value}" for name, value in self.fields)


@dataclass(frozen=True)
class Candidate:
    """A point of the lattice with the verdict of every budget. ``rejected`` holds the violated inequalities as text; empty means proven to fit."""

    plan: Plan
    cost: float
    usage: tuple[tuple[str, int, int, str], ...]  # (budget, used, limit, unit)
    rejected: tuple[str, ...]

    @property
    def binding(self) -> tuple[str, int, int, str]:
        """The budget closest to its limit."""
        return max(self.usage, key=lambda u: u[1] / u[2])


SPARSE = 0.1  # share of explicit blocks that is taken to be visible where tiles are priced


def met(block: int, tile: int) -> float:
    """How much more of an axis is visited for meeting explicit blocks with tiles: blocks that a tile cuts are met by two, and a tile of several blocks is
    visited for any of them."""
    if not block:
        return 1.0
    straddling = (1 + (tile - gcd(tile, block)) / block) / max(1, tile / block)
    return straddling * (1 - (1 - SPARSE) ** max(1, tile / block)) / SPARSE


def candidates(facts: Facts, problem: Problem, target: Target, family: str, forced: Mapping[str, int] | None = None) -> list[Candidate]:
    """Every lattice point, best first; those that do not fit come last, with the inequality that fails."""
    import sympy

    record = families.get(family)
    lattice = record.lattice(problem, facts, target)
    own = set(lattice[0]) if lattice else set()
    other = record.lattice(replace(problem, which="backward" if problem.which == "forward" else "forward"), facts, target)
    forced = {name: value for name, value in (forced or {}).items() if name in own or name not in set().union(*other)}  # the other pass's are not meant here
    # First those that have the fields which go with a value.
    nearest = sorted(lattice, key=lambda p: -sum(p.get(name) == value for name, value in forced.items()))
    points = [record.derive(problem.which, {**p, **forced}) for p in nearest]
    kept = [p for p in points if all(p.get(name, value) == value for name, value in forced.items())]  # of fields that follow from others, those that agree
    if points and not kept:
        choices = "; ".join(f"{name} {', '.join(map(str, sorted({p[name] for p in lattice if name in p})))}" for name in forced if name in own)
        raise VariantError(f"plan={forced}: no plan of family {family} has these together. Its plans have {choices}; other fields follow (see Kernel.plan).")
    points = kept
    known = set().union(*points) if points else set()
    unknown = set(forced) - own if points else set()
    if unknown:
        raise VariantError(f"plan={{{', '.join(sorted(unknown))}}}: no such field of family {family}; its fields are {', '.join(sorted(known - unknown))}.")
    constraints = record.constraints(problem, target)
    cost = sympy.sympify(record.cost(problem, facts, target))
    found: dict[Plan, Candidate] = {}
    for point in points:
        chosen = Plan(family, problem.which, tuple(sorted(point.items())))
        if chosen in found:
            continue
        values = {sympy.Symbol(name): sympy.Integer(value) for name, value in point.items()}
        usage, rejected = [], []
        for c in constraints:
            used = int(sympy.ceiling(sympy.sympify(c.expr).xreplace(values)))
            if c.limit:  # a limit of 0 makes a rule, not a budget
                usage.append((c.name, used, c.limit, c.unit))
            if used > c.limit:
                rejected.append(f"{c.name}: {_decided(c.expr, values)} = {used} > {c.limit} {c.unit}")
        price = float(cost.xreplace(values)) * met(facts.block, point["block_q"]) * met(facts.block, point["block_kv"])
        found[chosen] = Candidate(chosen, price, tuple(usage), tuple(rejected))
    return sorted(found.values(), key=lambda c: (bool(c.rejected), c.cost))


def _decided(expr: Any, values: Mapping[Any, Any]) -> Any:
    """The case of a formula that applies, so that a reader sees that alone."""
    import sympy

    cases = sympy.sympify(expr).atoms(sympy.Piecewise)
    deciding = {symbol for piecewise in cases for _, condition in piecewise.args for symbol in condition.free_symbols}
    return sympy.sympify(expr).xreplace({symbol: values[symbol] for symbol in deciding if symbol in values})


def plan(facts: Facts, problem: Problem, target: Target, family: str, forced: Mapping[str, int] | None = None) -> Plan:
    """The tiler's first choice. Raises VariantError naming the inequality when nothing fits."""
    ranked = candidates(facts, problem, target, family, forced)
    if not ranked:
        raise VariantError(f"family {family} has no plan for {problem}.")
    if ranked[0].rejected:
        remedy = f"Change plan={dict(forced)}." if forced else "Choose a smaller head_dim."
        raise VariantError(f"no plan of family {family} fits {target.name}: {'; '.join(ranked[0].rejected)}. {remedy}")
    return ranked[0].plan
