"""Is every slope right: each rule against sympy, each score against torch's autograd, kinks and untaken branches included?"""

from __future__ import annotations

import math

import cases_variants
import probes
import pytest
import sympy
import torch
import torch.nn.functional as F

import flashgen as fg
from flashgen.derivative import PARTIALS, Graph, load_slopes, score_slope
from flashgen.form import Form, Node, Traced
from flashgen.language import REAL

SYMPY = {
    "exp": sympy.exp, "exp2": lambda x: 2**x, "expm1": lambda x: sympy.exp(x) - 1, "log": sympy.log, "log2": lambda x: sympy.log(x, 2),
    "log1p": lambda x: sympy.log(1 + x), "sqrt": sympy.sqrt, "rsqrt": lambda x: 1 / sympy.sqrt(x), "sin": sympy.sin, "cos": sympy.cos, "tan": sympy.tan,
    "asin": sympy.asin, "acos": sympy.acos, "atan": sympy.atan, "sinh": sympy.sinh, "cosh": sympy.cosh, "tanh": sympy.tanh, "erf": sympy.erf,
    "sigmoid": lambda x: 1 / (1 + sympy.exp(-x)), "atan2": sympy.atan2, "pow": sympy.Pow, "add": lambda x, y: x + y, "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y, "div": lambda x, y: x / y, "neg": lambda x: -x,
}  # fmt: skip
BINARY = ("atan2", "pow", "add", "sub", "mul", "div")


def slope_of(traced: Traced, symbols, real=torch.float64, load: int | None = None):
    """d score / d s by the appended nodes, or d score / d (a load node)."""
    graph = Graph(traced.form)
    root = score_slope(graph) if load is None else dict(load_slopes(graph, tuple(range(len(traced.captures)))))[load]
    return probes.value(traced._replace(form=graph.extended()), root, symbols, real)


def rule(op: str):
    """The partials of one operation with its arguments x (s) and y (a captured value), as functions of numbers."""
    nodes = [Node("s", REAL), Node("load", REAL, (), 0)]
    args = (0, 1) if op in BINARY else (0,)
    form = Form((*nodes, Node(op, REAL, args)), 2, -1, (fg.form.CaptureSpec("float64", 0),), 0, ())

    def at(x: float, y: float) -> list[float]:
        traced = Traced(form, (fg.language.Capture(torch.tensor(y, dtype=torch.float64)),), (), (), (0,))
        symbols = probes.axes(probes.SIZES, s=torch.tensor(x, dtype=torch.float64))
        return [float(slope_of(traced, symbols, load=load)) for load in (None, 1)[: len(args)]]

    return at


def test_sympy_covers_every_rule():
    assert set(PARTIALS) <= set(SYMPY)


@pytest.mark.parametrize("op", SYMPY)
def test_a_rule_is_sympys_derivative(op):
    x, y = sympy.symbols("x y", positive=True)
    expression = SYMPY[op](x, y) if op in BINARY else SYMPY[op](x)
    exact = [sympy.lambdify((x, y), sympy.diff(expression, v), "mpmath") for v in (x, y)[: 2 if op in BINARY else 1]]
    for at in ((0.3, 0.7), (0.9, 1.7), (0.05, 2.5)):
        assert rule(op)(*at) == pytest.approx([float(f(*at)) for f in exact], rel=1e-12, abs=1e-12), at


POINTS = torch.tensor([-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0, 6.0], dtype=torch.float64)  # kinks of what follows among them
HALF = torch.tensor(0.5, dtype=torch.float64)
KINKED = {
    "abs": lambda s: s.abs(), "relu": torch.relu, "relu6": F.relu6, "hardtanh": F.hardtanh, "leaky relu": F.leaky_relu, "elu": F.elu, "softplus": F.softplus,
    "clamp at a bound": lambda s: s.clamp(-1.0, 0.5), "clamp min": lambda s: s.clamp(min=1.0), "clamp max": lambda s: s.clamp(max=-0.5),
    "clamp crossed": lambda s: s.clamp(1.0, -1.0),
    "maximum tie": lambda s: torch.maximum(s, s * s), "minimum tie": lambda s: torch.minimum(s * 2, s * s * 2), "fmax tie": lambda s: torch.fmax(s, s * s),
    "fmin tie": lambda s: torch.fmin(s, s * s),
    "maximum with itself": lambda s: torch.maximum(s, s), "sign": lambda s: s * torch.sign(s), "floor": lambda s: s.floor() * s,
    "round": lambda s: torch.round(s) + s,
    "remainder": lambda s: s % 0.75, "fmod": lambda s: torch.fmod(s * s, s + 7.1), "remainder in divisor": lambda s: torch.remainder(s + 9, s.abs() + 1.3),
    "detach": lambda s: s.detach() * s, "int cast": lambda s: s.int() * s, "square and cube": lambda s: s**2 + s**3 + s**5,
    "power": lambda s: (s + 4) ** 1.5 + (s + 4) ** -0.5,
    "power of the exponent": lambda s: torch.pow(2.5, s), "zero to the s": lambda s: torch.pow(torch.zeros_like(s), s.abs()),
    "where": lambda s: torch.where(s > 0, s * s, -s), "where on the branch": lambda s: torch.where(s >= 0, s, 0.1 * s),
    "gelu": F.gelu, "gelu tanh": lambda s: F.gelu(s, approximate="tanh"), "silu": F.silu, "mish": F.mish, "logsigmoid": F.logsigmoid,
    "logaddexp": lambda s: torch.logaddexp(s, s * s),
    "division": lambda s: (s + 1) / (s + 7) / HALF + 1 / (s + 9), "atan2": lambda s: torch.atan2(s + 0.1, s * s - 2),
    "nested": lambda s: torch.sin(torch.exp(torch.tanh(s)) * s),
    "constant": lambda s: torch.zeros_like(s) + 3.0, "affine": lambda s: (s - 0.5) * 3 + 1, "shared": lambda s: torch.tanh(s) * torch.tanh(s) + torch.tanh(s),
}  # fmt: skip
HAZARDS = {
    "log behind where": lambda s: torch.where(s > 0, torch.log(s.clamp(min=1e-6)), s), "bare log": lambda s: torch.where(s > 0, torch.log(s), 0.0),
    "sqrt behind where": lambda s: torch.where(s > 1, torch.sqrt(s), s), "division behind where": lambda s: torch.where(s != 0, 1 / s, 0.0),
    "infinite branch": lambda s: torch.where(s > 0, -math.inf, s * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", KINKED)
def test_a_slope_is_autograds_kinks_included(name):
    function = KINKED[name]
    traced = probes.trace(score=lambda s, b, h, q, k: function(s))
    s = POINTS.clone().requires_grad_()
    wanted = torch.autograd.grad(function(s).sum(), s, allow_unused=True)[0] if function(s).requires_grad else None
    got = slope_of(traced, probes.axes(probes.SIZES, s=POINTS)).expand(POINTS.shape)
    torch.testing.assert_close(got, torch.zeros_like(POINTS) if wanted is None else wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", HAZARDS)
def test_the_branch_not_taken_cannot_make_a_slope_nan(name):
    traced = probes.trace(score=lambda s, b, h, q, k: HAZARDS[name](s))
    got = slope_of(traced, probes.axes(probes.SIZES, s=POINTS)).expand(POINTS.shape)
    assert torch.isfinite(got).all()
    for at, slope in zip(POINTS.tolist(), got.tolist()):  # autograd of the branch alone, a central difference
        step = 1e-6
        low, high = (torch.as_tensor(HAZARDS[name](torch.tensor(at + d, dtype=torch.float64))) for d in (-step, step))
        if torch.isfinite(low) and torch.isfinite(high) and at not in (0.0, 1.0):
            assert slope == pytest.approx(float(high - low) / (2 * step), rel=1e-6, abs=1e-6)


SCORES = [name for name, case in cases_variants.CASES.items() if cases_variants.instantiate(case).mods.score is not None]


@pytest.mark.parametrize("name", SCORES)
def test_slopes_of_every_case_are_autograds(name):
    run = cases_variants.instantiate(name, dtype=torch.float64, grad=True)
    traced = probes.trace(score=run.mods.score)
    sizes = {"b": run.shape["B"], "h": run.shape["Hq"], "q": run.shape["Lq"], "k": run.shape["Lk"]}
    found = probes.points(200, 5, torch.float64, sizes)
    symbols = probes.stacked(found, sizes)
    s = symbols["s"].clone().requires_grad_()
    inside = {n: symbols[n].long() for n in "bhqk"}
    learned = [run.ctx.captured[n] for n in sorted(run.ctx.want_grad)]
    value = run.ref_score(s, inside["b"], inside["h"], inside["q"], inside["k"])
    finite = torch.isfinite(value)
    gradients = torch.autograd.grad(torch.where(finite, value, 0.0).sum(), [s, *learned], allow_unused=True)
    got = slope_of(traced, symbols).expand(s.shape)
    wanted = torch.zeros_like(s) if gradients[0] is None else gradients[0]
    torch.testing.assert_close(got[finite], wanted[finite], rtol=1e-6 if "trans" in run.case.needs else 1e-12, atol=1e-12)

    graph = Graph(traced.form)
    slopes = load_slopes(graph, traced.score_slots)
    extended = traced._replace(form=graph.extended())
    for tensor, wanted in zip(learned, gradients[1:]):
        total = torch.zeros_like(tensor)
        for load, slope in slopes:
            node = graph.nodes[load]
            if probes.replayed(traced)[node.data] is not tensor:
                continue
            index = tuple(probes.value(extended, a, symbols, torch.float64).long().expand(s.shape) for a in node.args)
            each = torch.where(finite, probes.value(extended, slope, symbols, torch.float64).expand(s.shape), 0.0)
            total = total.index_put(index, each.detach(), accumulate=True) if index else total + each.sum()
        torch.testing.assert_close(total, wanted, rtol=1e-9, atol=1e-9)


def test_the_slope_shares_the_nodes_of_the_value():
    form = probes.trace(score=fg.softcap(30.0)).form
    graph = Graph(form)
    score_slope(graph)
    assert [n.op for n in graph.nodes].count("tanh") == 1


def test_an_affine_score_has_a_slope_without_s():
    graph = Graph(probes.trace(score=lambda s, b, h, q, k: s * (h + 1) - k).form)
    slope = score_slope(graph)
    assert "s" not in graph.extended().depends[slope]
    assert fg.analysis.analyze(graph.form).score_affine and not fg.analysis.analyze(probes.trace(score=fg.softcap(3.0)).form).score_affine
