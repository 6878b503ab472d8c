"""Explain: what was proved of a variant, what bounds the tile, predicted traffic and time, in prose and numbers.

Form, Problem, Target, Shape -> text. Example: ``print(kernel.explain(q, k, v))``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from . import families, pipeline
from .analysis import Facts, analyze, describe
from .evaluate import evaluate
from .families import Family
from .form import Form, Traced
from .plan import Candidate
from .problem import Problem
from .target import Target
from .traffic import Shape, Traffic, forecast

SAMPLED_PAIRS = 1 << 18  # of which the visible ones are counted: all of a problem of 512 x 512
FEWEST_ROWS = 32  # however many keys there are


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
    lines += ["", "Proved", *(f"  {s}" for s in _sentences(facts, form, numbers))]
    lines += _arguments(numbers)
    tiles, traffic = forecast(form, problem, target, shapes, best.plan, numbers)
    lines += [
        f"  Tiles of {best.plan.block_q} x {best.plan.block_kv} per head: {tiles.full:.0f} full (no mask code), {tiles.partial:.0f} partial, "
        f"{tiles.empty:.0f} empty (never loaded)."
    ]
    pairs = _visible_pairs(form, shapes[0], numbers) if len(shapes) == 1 else None
    if pairs is not None and tiles.visited:
        computed = tiles.visited * best.plan.block_q * best.plan.block_kv
        lines += [f"  Visible: about {pairs / computed:.0%} of the pairs in the tiles that are visited."]
    tuned = use_records and chosen == pipeline.recorded(form, problem, target, family, forced)
    origin = "measured: a record of the tuner" if tuned else "the choice of the tiler"
    lines += ["", f"Plan ({origin})", f"  {best.plan}", *(f"  {n}: {used} of {limit} {unit}" for n, used, limit, unit in best.usage)]
    tight = best.binding
    lines += [f"  What bounds the tile: {tight[0]} ({tight[1]} of {tight[2]} {tight[3]})."]
    lines += _rejections(ranked, best)
    lines += ["", "Predicted", *_prediction(traffic, target)]
    lines += _clocks(families.get(name), problem, facts, target, best)
    return "\n".join(lines)


def _shapes(shapes: Sequence[Shape]) -> str:
    """One batch, or packed sequences by their lengths, the longest last."""
    if len(shapes) == 1:
        return str(shapes[0])
    parts = ", ".join(f"{s.batch} of {s.q_len}/{s.kv_len}" for s in shapes)
    return f"heads {shapes[0].heads}/{shapes[0].kv_heads}, packed sequences: {parts}"


def _sentences(facts: Facts, form: Form, numbers: Traced) -> list[str]:
    """What was proved, with the present values of captured numbers instead of the names that the emitted text gives them."""
    text = f"{describe(facts.kv_bounds, 'k', form, numbers.ints)} (bounds of the loop; the mask itself is tested in partial tiles)"
    return replace(facts, kv_text=text).sentences


def _arguments(numbers: Traced) -> list[str]:
    """What the names of captured values stand for that the emitted text gives them."""
    named = [f"capture_{n} is {_described(c.tensor)}" for n, c in enumerate(numbers.captures)]
    named += [f"{kind}_{n} = {x}" for kind, values in (("float", numbers.floats), ("int", numbers.ints)) for n, x in enumerate(values)]
    return [f"  In the emitted text {', '.join(named)}."] if named else []


def _described(tensor: torch.Tensor | None) -> str:
    return "an input" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _visible_pairs(form: Form, shape: Shape, numbers: Traced) -> float | None:
    """Pairs of head (0, 0) that the mask shows, from evenly spaced rows; None without a mask, or where the values of a captured tensor are not at hand."""
    captures = [c.tensor for c in numbers.captures]
    if form.mask < 0 or any(t is None for t in captures) or not shape.q_len * shape.kv_len:
        return None
    count = min(shape.q_len, max(FEWEST_ROWS, SAMPLED_PAIRS // shape.kv_len))
    rows, columns = (torch.arange(n, dtype=torch.int32) for n in (count, shape.kv_len))
    sizes = {"b": 0, "h": 0, "q_len": shape.q_len, "kv_len": shape.kv_len, "heads": shape.heads}
    symbols = {name: torch.tensor(n, dtype=torch.int32) for name, n in sizes.items()}
    symbols |= {"q": ((rows + 0.5) * shape.q_len / count).int()[:, None], "k": columns}
    seen = evaluate(form, form.mask, symbols, [t.detach().cpu() for t in captures], numbers.floats, numbers.ints, torch.float32)
    return float(seen.expand(count, shape.kv_len).double().mean()) * shape.q_len * shape.kv_len


def _rejections(ranked: list[Candidate], best: Candidate) -> list[str]:
    """The first that do not fit: the fields in which they differ from the plan, and the inequality that fails."""
    rejected = [c for c in ranked if c.rejected]
    own = best.plan.as_dict()
    differing = lambda c: ", ".join(f"{name}={value}" for name, value in c.plan.fields if own.get(name) != value)  # noqa: E731
    lines = [f"  {len(ranked)} candidates, {len(rejected)} rejected" + (", by their fields that differ:" if rejected else ".")]
    return lines + [f"    {differing(c)}: {'; '.join(c.rejected)}" for c in rejected[:4]] + (["    ..."] if len(rejected) > 4 else [])


def _prediction(t: Traffic, target: Target) -> list[str]:
    return [
        f"  Traffic, this plan: {t.plan_bytes / 1e6:.1f} MB between memory levels (tiles loaded, rows in and out).",
        f"  Traffic, FlashAttention bound N^2 d^2 / M: {t.bound_bytes / 1e6:.1f} MB with M = {t.fast_elements:.0f} elements.",
        f"  Traffic, standard algorithm 4 N^2 + 4 N d: {t.standard_bytes / 1e6:.1f} MB ({t.standard_bytes / max(t.plan_bytes, 1):.1f} x this plan's).",
        f"  Roofline: {t.flops / 1e9:.1f} GFLOP (all pairs of visited tiles) at {t.tflops:.2f} TFLOP/s = {t.compute_ms:.3f} ms; "
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
