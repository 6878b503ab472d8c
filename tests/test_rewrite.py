"""Do rewritten scores (q . k unscaled, a factor taken out) compute the user's function, in fewer operations, and do the proved bounds hold?"""

from __future__ import annotations

import math
import random

import pytest
import torch

import flashgen as fg
from flashgen.form import Form
from flashgen.rewrite import Unscaled, multiply_by_reciprocals, unscaled
from flashgen.score_bounds import MOST, score_bounds, static_bounds

STRENGTH = torch.tensor([0.3, -0.2])
SCALE = 0.125

SCORES = {
    "soft-cap": fg.softcap(30.0),
    "negative cap": lambda s, b, h, q, k: -3.0 * torch.tanh(s / 2.0),
    "ALiBi": fg.alibi(),
    "quadratic": lambda s, b, h, q, k: s + 0.1 * s * s,
    "cubic, constant": lambda s, b, h, q, k: 2.0 - s * s * s * 0.5 + s,
    "product with a sum": lambda s, b, h, q, k: s * (1.0 + 0.02 * s) - 0.001 * s * s * s,
    "sum by distance": lambda s, b, h, q, k: (q - k) * (1.0 + 0.02 * s),
    "temperature": lambda s, b, h, q, k: s * 1.5,
    "by head": lambda s, b, h, q, k: s * STRENGTH[h] + 0.01 * (q - k).abs(),
    "cancelling sum": lambda s, b, h, q, k: (s + 100000.0) - 100000.0,
    "two powers alike": lambda s, b, h, q, k: s + 2.0 * s,
    "even keys": lambda s, b, h, q, k: torch.where(k % 2 == 0, s, -math.inf),
    "clamped": lambda s, b, h, q, k: torch.clamp(s, -5.0, 4.0) + torch.sigmoid(s),
    "reversed distance": lambda s, b, h, q, k: s + (k - (q + 3)) * 0.5,
}
CALLS = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b, "neg": lambda a: -a, "abs": abs,
    "cast": lambda a: a, "minimum": min, "maximum": max, "tanh": math.tanh, "real_distance": lambda q, k, rest=0: q - k + rest,
    "fma": lambda a, b, c: a * b + c, "where": lambda c, a, b: a if c else b, "mod": lambda a, b: a % b, "eq": lambda a, b: a == b,
    "lt": lambda a, b: a < b, "ge": lambda a, b: a >= b, "gt": lambda a, b: a > b, "le": lambda a, b: a <= b, "and": lambda a, b: a and b,
    "sigmoid": lambda a: 1 / (1 + math.exp(-a)), "exp2": lambda a: 2.0**a, "detach": lambda a: a,
}  # fmt: skip


def value(form: Form, root: int, point: dict[str, float], floats: tuple[float, ...], ints: tuple[int, ...], captures: list[torch.Tensor]) -> float:
    found: dict[int, float] = {}
    for i in sorted(form.reachable(root)):
        node = form.nodes[i]
        args = [found[a] for a in node.args]
        match node.op:
            case "const":
                found[i] = node.data
            case "number":
                found[i] = floats[node.data] if node.type in ("real", "single") else ints[node.data]
            case "load":
                found[i] = captures[node.data][tuple(args)].item()
            case op if op in point:
                found[i] = point[op]
            case op:
                found[i] = CALLS[op](*args)
    return found[root]


def rewritten(name: str) -> tuple[fg.Variant, object, Unscaled, bool]:
    variant = fg.Variant(mask=fg.causal, score=SCORES[name])
    traced = variant.trace({})
    positive = score_bounds(traced.form, tuple(traced.floats), SCALE).positive_gain
    return variant, traced, unscaled(multiply_by_reciprocals(traced.form), positive_gain=positive), positive


@pytest.mark.parametrize("name", SCORES)
def test_the_function_stays(name):
    _, traced, made, positive = rewritten(name)
    assert (made.gain >= 0) == positive
    captures = [c.tensor for c in traced.captures]
    rng = random.Random(0)
    for _ in range(200):
        point = {"b": 0, "h": rng.randrange(2), "q": rng.randrange(40), "k": rng.randrange(50), "q_len": 40, "kv_len": 50, "heads": 2}
        dot = rng.uniform(-60.0, 60.0)
        wanted = value(traced.form, traced.form.score, {**point, "s": dot * SCALE}, traced.floats, traced.ints, captures)
        given = {**point, "s": dot, "scale": SCALE}
        found = value(made.form, made.form.score, given, traced.floats, traced.ints, captures)
        found *= value(made.form, made.gain, given, traced.floats, traced.ints, captures) if made.gain >= 0 else 1.0
        masked = [value(f, f.mask, given, traced.floats, traced.ints, captures) for f in (traced.form, made.form)]
        assert masked[0] == masked[1]
        counts = masked[0] or name != "ALiBi"  # whose distance has the sign of those that the mask shows
        assert not counts or found == wanted or abs(found - wanted) < 1e-9 * max(1.0, abs(wanted))


def operations(name: str) -> list[str]:
    """Those of a pair, in the rewritten score."""
    form = rewritten(name)[2].form
    inner = [i for i in form.reachable(form.score) if "s" in form.depends[i] or {"q", "k"} <= form.depends[i]]
    return sorted(form.nodes[i].op for i in inner if form.nodes[i].args)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("soft-cap", ["mul", "tanh"]),
        ("quadratic", ["fma", "mul"]),
        ("product with a sum", ["fma", "fma", "mul"]),
        ("sum by distance", ["fma", "mul", "real_distance"]),
        ("ALiBi", ["fma", "mul", "neg", "real_distance"]),
        ("by head", ["abs", "cast", "fma", "mul", "real_distance"]),
        ("temperature", []),
        ("cancelling sum", ["fma", "sub"]),
    ],
)
def test_a_pair_costs_little(name, wanted):
    assert operations(name) == wanted


@pytest.mark.parametrize(
    ("mask", "sign"),
    [
        (fg.causal, 1),
        (fg.sliding_window(5, 0) & fg.causal, 1),
        (fg.mask(lambda b, h, q, k: (q + (fg.kv_len - fg.q_len) > k) & (k % 2 == 0)), 1),
        (fg.mask(lambda b, h, q, k: k >= q + (fg.kv_len - fg.q_len)), -1),
        (fg.mask(lambda b, h, q, k: k <= q), 0),
        (fg.causal | fg.sliding_window(5, 5), 0),
        (fg.sliding_window(5, 5), 0),
        (None, 0),
    ],
)
def test_a_distance_has_the_sign_that_the_mask_shows(mask, sign):
    form = unscaled(fg.Variant(mask=mask, score=fg.alibi()).trace({}).form, positive_gain=False).form
    found = [form.nodes[i] for i in form.reachable(form.score)]
    (distance,) = (i for i in form.reachable(form.score) if form.nodes[i].op == "real_distance")
    user = next(n.op for n in found if distance in n.args)
    assert (user == "abs", user == "neg") == (sign == 0, sign < 0)


def test_bounds_hold_and_find_what_is_bounded():
    for name, magnitude in {"soft-cap": 30.0, "negative cap": 3.0, "clamped": 5.0, "quadratic": math.inf, "ALiBi": math.inf}.items():
        traced = fg.Variant(score=SCORES[name]).trace({})
        assert score_bounds(traced.form, tuple(traced.floats), SCALE).magnitude == magnitude


@pytest.mark.parametrize(("cap", "bounded", "positive"), [(30.0, True, True), (MOST + 1, False, True), (-2.0, True, False), (math.nan, False, False)])
def test_bounds_follow_the_numbers_of_a_call(cap, bounded, positive):
    traced = fg.Variant(score=lambda s, b, h, q, k: cap * torch.tanh(s)).trace({})
    assert static_bounds(traced.form, traced.floats, SCALE) == {"bounded": bounded, "positive_gain": positive}


def test_no_score_is_not_bounded():
    traced = fg.Variant(mask=fg.causal).trace({})
    assert static_bounds(traced.form, traced.floats, SCALE) == {"bounded": False, "positive_gain": False}
