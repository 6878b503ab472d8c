"""The driver: Form, Problem, Target -> Executable, through the cache.

Example: ``prepare(form, problem, target).plan``. Cold, it reads: plan, emit, build. Warm, an index entry gives the plan and the binary's key,
and neither sympy nor jinja2 is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import abi, build, cache, families, records, settings
from .errors import CompileError, FlashgenError
from .form import Form
from .plan import Plan
from .problem import Problem
from .source import Binary
from .target import Target

if TYPE_CHECKING:
    from .plan import Candidate
    from .source import Source


@dataclass(frozen=True)
class Executable:
    """A planned and compiled pass, not yet loaded on a device."""

    form: Form
    problem: Problem
    target: Target
    plan: Plan
    params: abi.Params
    binary: Binary


def ranked(form: Form, problem: Problem, target: Target, family: str, forced: Mapping[str, int] | None = None) -> list[Candidate]:
    """The tiler's candidates, best first."""
    from .analysis import analyze
    from .plan import candidates

    return candidates(analyze(form), problem, target, family, forced)


def emit_source(form: Form, problem: Problem, target: Target, plan: Plan) -> Source:
    from .emit import Spec, emit

    return emit(Spec(form, problem, plan, target))


def choose_plan(form: Form, problem: Problem, target: Target, family: str | None, forced: Mapping[str, int] | None) -> Plan:
    """The first plan that fits, of the family that serves the problem."""
    from .analysis import analyze
    from .plan import plan

    name, _ = families.choose(problem, target, family, dict(forced or {}))
    return plan(analyze(form), problem, target, name, forced)


def _index_key(
    form: Form, problem: Problem, target: Target, family: str | None, forced: Mapping[str, int] | None, recorded: Plan | None
) -> str:  # fmt: skip
    return cache.digest(form.text, problem, target, family, dict(forced or {}), recorded, cache.package_digest(), build.compiler_version(target))


def recorded(form: Form, problem: Problem, target: Target, family: str | None, forced: Mapping[str, int] | None) -> Plan | None:
    """The winner that the tuner recorded for this problem on this chip, or None (also where there is no compiler: then nothing was ever measured)."""
    try:
        return records.winner(records.key(form, problem, target, family, forced))
    except CompileError:
        return None


def planned(
    form: Form, problem: Problem, target: Target, family: str | None, forced: Mapping[str, int] | None, *, use_records: bool = True
) -> Plan:  # fmt: skip
    """The plan that a call runs with: the recorded winner, else the one that was built (its build may have refused the first choice), else the first choice."""
    found = recorded(form, problem, target, family, forced) if use_records else None
    if found is not None:
        return found
    try:
        entry = cache.current().get_index(_index_key(form, problem, target, family, forced, None))
    except FlashgenError:  # no compiler here: planning needs none
        entry = None
    return choose_plan(form, problem, target, family, forced) if entry is None else _entry_plan(entry, problem)


def _entry_plan(entry: Mapping[str, Any], problem: Problem) -> Plan:
    return Plan(entry["family"], problem.which, tuple((n, v) for n, v in entry["fields"]))


def prepare(
    form: Form, problem: Problem, target: Target, *, family: str | None = None, forced: Mapping[str, int] | None = None, use_records: bool = True
) -> Executable:  # fmt: skip
    """Plan, emit and build one pass, or find it in the cache. A recorded winner of the tuner decides the plan unless ``use_records`` is off."""
    store = cache.current()
    use_index = settings.override() is None and settings.dump() is None
    tuned = recorded(form, problem, target, family, forced) if use_records else None
    key = _index_key(form, problem, target, family, forced, tuned)
    entry = store.get_index(key) if use_index else None
    if entry is not None:
        binary = store.get_binary(entry["binary"])
        if binary is not None:
            return executable(form, problem, target, _entry_plan(entry, problem), binary)
    if tuned is not None:
        plan = tuned
        binary_key, binary = build.build_cached(emit_source(form, problem, target, plan), target)
    else:
        plan, binary_key, binary = _compile_first_clean(form, problem, target, family, forced)
    store.put_index(key, {"binary": binary_key, "family": plan.family, "fields": [list(f) for f in plan.fields]})
    return executable(form, problem, target, plan, binary)


MOST_BUILDS = 8  # plans that are built in search of one without spills
HOPELESS_BYTES = 64  # spills from which on no other unrolling or staging of the same tile is tried


def spilled_bytes(binary: Binary) -> int:
    """Bytes that a build spills, and far more for what the reports' other faults cost."""
    report = binary.report
    spilled = sum(e.spill_stores + e.spill_loads + e.stack_bytes for e in report.entries)
    others = [f for f in report.faults if "spill" not in f]
    return spilled + (1 << 20 if others else 0)


def _compile_first_clean(form: Form, problem: Problem, target: Target, family: str | None, forced: Mapping[str, int] | None) -> tuple[Plan, str, Binary]:
    """Build the best plan; a 16-bit GPU kernel that spills is refused and the tiler's next plan taken. If all spill, the one that spills least."""
    first = choose_plan(form, problem, target, family, forced)
    if settings.debug() >= 2:
        for c in ranked(form, problem, target, first.family, forced):
            print(f"flashgen: {c.plan}: {'; '.join(c.rejected) or f'{c.cost:.4g} clocks a pair'}", file=sys.stderr)
    key, binary = build.build_cached(emit_source(form, problem, target, first), target)
    best = (spilled_bytes(binary), first, key, binary)
    if target.kind == "cuda" and problem.dtype_bytes == 2 and best[0]:
        names = ("block_q", "block_kv", "warps", "ctas", "dq_block_kv", "consumer_registers", "ahead", "mask_bits")
        tile = lambda plan: tuple(n for name, n in plan.fields if name in names)  # noqa: E731
        hopeless, built = {tile(first)} if best[0] > HOPELESS_BYTES else set(), 1
        for candidate in ranked(form, problem, target, first.family, forced)[1:]:
            if candidate.rejected or built == MOST_BUILDS or not best[0]:
                break
            if tile(candidate.plan) in hopeless:
                continue
            built += 1
            try:
                key, binary = build.build_cached(emit_source(form, problem, target, candidate.plan), target)
            except CompileError:
                continue
            spilled = spilled_bytes(binary)
            if spilled < best[0]:
                best = (spilled, candidate.plan, key, binary)
            if spilled > HOPELESS_BYTES:
                hopeless.add(tile(candidate.plan))
    return best[1:]


def executable(form: Form, problem: Problem, target: Target, plan: Plan, binary: Binary) -> Executable:
    """The pass of a plan and its binary."""
    family = families.get(plan.family)
    extras = tuple(family.params(problem, plan))
    return Executable(form, problem, target, plan, abi.params(form, problem, extras, family.grad_type(problem)), binary)
