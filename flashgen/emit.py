"""Emit: Spec -> Source, the text of one kernel with the closure of its headers.

Example: ``emit(Spec(form, problem, plan, target)).text``. Equal Specs give byte-equal text, in any process.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import jinja2

from . import abi, families, hooks
from .form import Form
from .plan import Plan
from .problem import Problem
from .source import Source
from .target import Target

_PACKAGED = Path(__file__).parent / "templates"
TEMPLATES = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parent.parent / "templates"  # a wheel carries them, a checkout has them beside
INCLUDE = TEMPLATES / "include"


@dataclass(frozen=True)
class Spec:
    """Everything that decides a kernel's text."""

    form: Form
    problem: Problem
    plan: Plan
    target: Target


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined, line_statement_prefix="//%", line_comment_prefix="//#",
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip


@lru_cache(maxsize=256)
def header(name: str) -> str:
    """The text of ``templates/include/<name>``."""
    return (INCLUDE / name).read_text()


def include_closure(text: str) -> tuple[tuple[str, str], ...]:
    """(name, text) of every fg/ header that the text includes, directly or not, sorted by name."""
    found: dict[str, str] = {}
    todo = re.findall(r'#include "(fg/[^"]+)"', text)
    while todo:
        name = todo.pop()
        if name not in found:
            found[name] = header(name)
            todo += re.findall(r'#include "(fg/[^"]+)"', found[name])
    return tuple(sorted(found.items()))


def emit(spec: Spec) -> Source:
    """Print the kernel of a Spec."""
    problem, plan = spec.problem, spec.plan
    family = families.get(plan.family)
    layout = abi.params(spec.form, problem, tuple(family.params(problem)))
    made = hooks.make(spec.form, problem)
    context = {
        "problem": problem, "plan": plan, "target": spec.target, "params": layout.fields, "hooks": made, "real": problem.real,
        "storage": abi.storage_type(problem), "headers": family.headers, "has_score": spec.form.score >= 0, "has_mask": spec.form.mask >= 0,
        "sink": problem.sink, "lse": problem.lse, "max_scores": problem.max_scores, "out_low": problem.out_low, "dlse": problem.dlse, "dq": problem.dq, "dk": problem.dk, "dv": problem.dv,
        "capture_grads": problem.capture_grads if made.capture_grads else (), "varlen": problem.layout == "varlen", "seqlens_k": problem.seqlens_k,
        "deterministic": problem.deterministic, "dropout": problem.dropout,
    }  # fmt: skip
    text = _environment().get_template(family.templates[template_key(problem)]).render(context)
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in text.splitlines())) + "\n"
    entries = tuple(re.findall(r'extern "C"[^;{]*?\b(\w+)\s*\(', text))
    return Source(text, "cuda" if spec.target.kind == "cuda" else "c++", include_closure(text), entries)


def template_key(problem: Problem) -> str:
    """Which template of a family serves a problem: the pass, and for float32 on a GPU its own (exact products need no tensor cores)."""
    return problem.which


def standalone(source: Source) -> str:
    """One file with every fg/ header inlined where it is first included; nvcc or g++ compile it with nothing else."""
    headers, seen = dict(source.headers), set()

    def expand(text: str) -> str:
        lines = []
        for line in text.splitlines():
            match = re.match(r'\s*#include "(fg/[^"]+)"', line)
            if match is None:
                lines.append(line)
            elif match[1] not in seen:
                seen.add(match[1])
                lines.append(f"// ---- {match[1]}")
                lines.append(expand(headers[match[1]].replace("#pragma once\n", "")))
        return "\n".join(lines)

    return expand(source.text) + "\n"
