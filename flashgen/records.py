"""Records: what the tuner measured, kept as JSON lines in the cache, one file and one lock per key; the last line of a key decides.

Form, Problem, Target -> recorded winner. Example: ``winner(key(form, problem, target, None, None))`` is a Plan or None.
A key names the chip, the size class (in the Problem), and the content of flashgen and its templates: another version measures anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from . import build, cache
from .form import Form
from .plan import Plan
from .problem import Problem
from .target import Target


def key(form: Form, problem: Problem, target: Target, family: str | None, forced: Mapping[str, int] | None) -> str:
    """The digest that a tuning record is kept under. Raises CompileError where the target's compiler is missing."""
    return cache.digest("tuning", form.text, problem, target, family, dict(forced or {}), *version(target))


def version(target: Target) -> tuple[str, str]:
    """What a record holds for besides the problem: flashgen's own sources, and the compiler. Raises CompileError where that is missing."""
    return cache.package_digest(), build.compiler_version(target)


def last(record_key: str) -> dict[str, Any] | None:
    """The newest sound record of a key."""
    return next((record for record in reversed(cache.current().records(record_key)) if _plan(record) is not None), None)


def winner(record_key: str) -> Plan | None:
    """The recorded winner, or None."""
    record = last(record_key)
    return None if record is None else _plan(record)


def append(record_key: str, record: Mapping[str, Any]) -> None:
    """Keep a record: ``winner`` {"family", "which", "fields"} decides; the rest is for readers and for replay."""
    cache.current().append_record(record_key, record)


@contextmanager
def lock(record_key: str) -> Iterator[None]:
    """One process tunes a key; others wait for its record."""
    with cache.current().lock(f"tune-{record_key}"):
        yield


def plan_entry(plan: Plan) -> dict[str, Any]:
    return {"family": plan.family, "which": plan.which, "fields": plan.as_dict()}


def _plan(record: Mapping[str, Any]) -> Plan | None:
    """The Plan that a record names; None where its line is not what this module wrote."""
    try:
        entry = record["winner"]
        fields = tuple(sorted((str(name), value) for name, value in entry["fields"].items()))
        family, which = entry["family"], entry["which"]
    except (KeyError, TypeError, AttributeError):
        return None
    sound = isinstance(family, str) and isinstance(which, str) and all(type(value) is int for _, value in fields)
    return Plan(family, which, fields) if sound else None
