"""Explain: what was proved of a variant, what bounds the tile, predicted traffic and time, in prose and numbers.

Form, Problem, Target, Shape -> text. Example: ``print(kernel.explain(q, k, v))``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from . import families, pipeline
from .analysis import Facts, analyze
from .families import Family
from .form import Form, Traced
from .plan import Candidate
from .problem import Problem
from .target import Target
from .traffic import Shape, Traffic, forecast


def explain(
    form: Form, problem: Problem, target: Target, shapes: Sequence[Shape], *, family: str | None, forced: Mapping[str, int], use_records: bool, numbers: Traced
) -> str:  # fmt: skip
    """The whole report."""
    facts = analyze(form)
    _, passed = families.choose(problem, target, family, forced)
    chosen = pipeline.planned(form, problem, target, family, forced, use_records=use_records)
    name = chosen.family
    ranked = pipeline.ranked(form, problem, target, name, forced)
    best = next((c for c in ranked if c.plan == chosen), ranked[0])
    lines = [
        f"{problem.which} on {target.name} ({target.chip}, {target.status}), {problem.dtype}, "
        f"head dims {problem.head_dim_qk}/{problem.head_dim_v}, {_shapes(shapes)}"
    ]
    lines += [f"Family: {name}." + "".join(f" Passed over {n}: {' '.join(r)}" for n, r in passed.items())]
    lines += ["", "Proved", *(f"  {_with_values(s, numbers)}" for s in facts.sentences)]
    tiles, traffic = forecast(form, problem, target, shapes, best.plan, numbers)
    lines += [
        f"  Tiles of {best.plan.block_q} x {best.plan.block_kv} per head: {tiles.full:.0f} full (no mask code), {tiles.partial:.0f} partial, "
        f"{tiles.empty:.0f} empty (never loaded)."
    ]
    tuned = use_records and chosen == pipeline.recorded(form, problem, target, family, forced)
    origin = "measured: a record of the tuner" if tuned else "the choice of the tiler"
    lines += ["", f"Plan ({origin})", f"  {best.plan}", *(f"  {n}: {used} of {limit} {unit}" for n, used, limit, unit in best.usage)]
    tight = best.binding
    lines += [f"  What bounds the tile: {tight[0]} ({tight[1]} of {tight[2]} {tight[3]})."]
    lines += _rejections(ranked)
    lines += ["", "Predicted", *_prediction(traffic, target)]
    lines += _clocks(families.get(name), problem, facts, target, best)
    return "\n".join(lines)


def _shapes(shapes: Sequence[Shape]) -> str:
    """One batch, or packed sequences by their lengths, the longest last."""
    if len(shapes) == 1:
        return str(shapes[0])
    parts = ", ".join(f"{s.batch} of {s.q_len}/{s.kv_len}" for s in shapes)
    return f"heads {shapes[0].heads}/{shapes[0].kv_heads}, packed sequences: {parts}"


def _with_values(sentence: str, numbers: Traced) -> str:
    """Captured numbers by their present values instead of the names that the emitted text gives them."""
    return re.sub(r"\bint_(\d+)\b", lambda m: str(numbers.ints[int(m[1])]), sentence)


def _rejections(ranked: list[Candidate]) -> list[str]:
    rejected = [c for c in ranked if c.rejected]
    lines = [f"  {len(ranked)} candidates, {len(rejected)} rejected" + (":" if rejected else ".")]
    return lines + [f"    {dict(c.plan.fields)}: {'; '.join(c.rejected)}" for c in rejected[:4]] + (["    ..."] if len(rejected) > 4 else [])


def _prediction(t: Traffic, target: Target) -> list[str]:
    return [
        f"  Traffic, this plan: {t.plan_bytes / 1e6:.1f} MB between memory levels (tiles loaded, rows in and out).",
        f"  Traffic, FlashAttention bound N^2 d^2 / M: {t.bound_bytes / 1e6:.1f} MB with M = {t.fast_elements:.0f} elements.",
        f"  Traffic, standard algorithm 4 N^2 + 4 N d: {t.standard_bytes / 1e6:.1f} MB ({t.standard_bytes / max(t.plan_bytes, 1):.1f} x this plan's).",
        f"  Roofline: {t.flops / 1e9:.1f} GFLOP at {t.tflops:.2f} TFLOP/s = {t.compute_ms:.3f} ms; "
        f"{t.compulsory_bytes / 1e6:.1f} MB at {target.hbm_gbs:.0f} GB/s = {t.memory_ms:.3f} ms.",
        f"  Bound by {'arithmetic' if t.compute_ms > t.memory_ms else 'memory'} ({max(t.compute_ms, t.memory_ms):.3f} ms).",
    ]


def _clocks(family: Family, problem: Problem, facts: Facts, target: Target, best: Candidate) -> list[str]:
    """What each unit of an SM works on a tile, where the family counts it, and the rate that follows from the busiest one and from the family's cost."""
    import sympy

    plan = best.plan.as_dict()
    found = {unit: float(sympy.sympify(x).subs(plan)) for unit, x in family.clocks(problem, facts).items()}
    if not found:
        return []
    busiest, matrix = max(found, key=found.__getitem__), next(iter(found.values()))
    rate = target.tensor_tflops * matrix  # over the clocks of a tile; in those of the matrix units alone it is the chip's
    lines = [
        f"  Clocks of an SM for a tile of {plan['block_q']} x {plan['block_kv']}: {', '.join(f'{unit} {x:.0f}' for unit, x in found.items())}.",
        f"  Busiest: {busiest}, at most {rate / found[busiest]:.0f} TFLOP/s at {target.clock_mhz} MHz.",
    ]
    if sympy.sympify(family.cost(problem, facts, target)).free_symbols:
        clocks = best.cost * plan["block_q"] * plan["block_kv"]
        lines.append(f"  With what does not overlap: {clocks:.0f} clocks a tile, {rate / clocks:.0f} TFLOP/s. Power limits lower the clock.")
    return lines
