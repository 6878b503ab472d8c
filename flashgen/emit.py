"""Emit: Spec -> Source, the text of one kernel with the closure of its headers.

Example: ``emit(Spec(form, problem, plan, target)).text``. Equal Specs give byte-equal text, in any process.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

import jinja2

from . import abi, families, hooks, settings
from .analysis import analyze
from .form import Form
from .plan import Plan
from .problem import Problem
from .source import Source
from .target import Target


@dataclass(frozen=True)
class Spec:
    """Everything that decides a kernel's text."""

    form: Form
    problem: Problem
    plan: Plan
    target: Target


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(settings.templates_directory()),
        undefined=jinja2.StrictUndefined,
        line_statement_prefix="//%",
        line_comment_prefix="//#",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    made.filters["deeper"] = _deeper
    return made


def _deeper(text: str, columns: int) -> str:
    """Code of a template where it stands in one more block; directives stay at the margin."""
    return re.sub(r"^(?=[^#\n])", " " * columns, text, flags=re.M)


@lru_cache(maxsize=256)
def header(name: str) -> str:
    """The text of ``templates/include/<name>``."""
    return (settings.templates_directory() / "include" / name).read_text()


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
    layout = abi.params(spec.form, problem, tuple(family.params(problem, plan)), family.grad_type(problem))
    raw = family.raw_scores(problem, plan)
    made = hooks.make(spec.form, problem, raw=raw, gaps=raw and family.gaps)
    context = {
        "problem": problem, "plan": plan, "target": spec.target, "params": layout.fields, "hooks": made, "real": problem.real,
        "raw_scores": raw, "bounded": problem.bounded and problem.dtype == "bfloat16" and not problem.max_scores,
        "storage": abi.storage_type(problem), "headers": family.headers, "has_score": spec.form.score >= 0, "has_mask": spec.form.mask >= 0,
        "capture_grads": problem.capture_grads if made.capture_grads else (), "varlen": problem.layout == "varlen", "seqlens_k": problem.seqlens_k,
        **{name: getattr(problem, name) for name in ("sink", "lse", "max_scores", "out_low", "dlse", "dq", "dk", "dv", "deterministic", "dropout")},
    }  # fmt: skip
    text = _environment().get_template(family.templates[problem.which]).render(context)
    text = _spaced(_opening(spec) + text)
    entries = tuple(re.findall(r"\b(\w+)\(const (?:__grid_constant__ )?Params\b(?![^;{]*;)", text[text.find('extern "C"') :]))
    name = f"{plan.family}_{problem.which}_{sha256(text.encode()).hexdigest()[:8]}"
    return Source(text, "cuda" if spec.target.kind == "cuda" else "c++", include_closure(text), entries, name)


def _opening(spec: Spec) -> str:
    """The comment a kept file opens with: what it computes, for what, and what was proved."""
    problem = spec.problem
    traits = [spec.target.name, problem.dtype, f"head dims {problem.head_dim_qk}/{problem.head_dim_v}", f"family {spec.plan.family}"]
    traits += [f"{problem.group} query heads per kv head"] if problem.group > 1 else []
    traits += [name for name in ("sink", "dropout", "deterministic", "seqlens_k") if getattr(problem, name)]
    traits += [problem.layout] if problem.layout != "dense" else []
    lines = [f"Attention {problem.which} written by flashgen: {', '.join(traits)}.", *analyze(spec.form).sentences]
    return "".join(f"// {line}\n" for line in lines)


def _spaced(text: str) -> str:
    """A blank line around each top-level definition and each block of includes, never two; line statements of Jinja swallow those after them."""
    lines: list[str] = []
    for raw in text.splitlines():
        line = raw.rstrip()
        before = lines[-1] if lines else ""
        ended = before in ("}", "};", "}  // namespace") and not line.startswith(("}", "static_assert"))
        turned = bool(before) and before.startswith("#include") != line.startswith("#include") and not before.startswith("//")
        if line and before and (ended or turned):
            lines.append("")
        if line or before:
            lines.append(line)
    return "\n".join(lines).rstrip() + "\n"


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
