"""Does a score or mask function mean the same traced as called by torch, and what is static in its Form?

Every construct is compared at random points: the Form evaluated against the very Python function on 0-d tensors, in float32 and float64.
"""

from __future__ import annotations

import functools
import math

import probes
import pytest
import torch
from constructs import CAPTURES, CONSTRUCTS, FLOATING, LONGS, MASKS, NEG, TABLE, ints, with_defaults

import flashgen
from flashgen import hooks
from flashgen.form import Form
from flashgen.language import INT, LONG, REAL, SINGLE


@pytest.mark.parametrize("real", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_a_construct_means_the_same_traced_as_called(name, real, monkeypatch):
    for key, tensor in TABLE.items():  # FlexAttention's captured floats have the dtype of the scores
        monkeypatch.setitem(TABLE, key, tensor.to(real) if tensor.dtype == torch.float64 else tensor)
    function = functools.partial(with_defaults, table=TABLE["t"]) if name == "defaults" else CONSTRUCTS[name]
    traced = probes.trace(score=function)
    found = probes.points(60, seed=len(name), real=real)
    got = probes.value(traced, traced.form.score, probes.stacked(found), real)
    wanted = torch.stack([torch.as_tensor(function(p["s"], p["b"], p["h"], p["q"], p["k"])).to(real) for p in found])
    # made of other operations than torch's own, or vectors and single numbers taking different paths in torch
    loose = name in FLOATING or name in ("powers", "partial and a vector", "float32 functions")
    single = real == torch.float32 or name == "float32 functions"
    tolerance = (3e-6 if single else 1e-13) if loose else 0.0
    torch.testing.assert_close(got.expand(wanted.shape), wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_means_the_same_traced_as_called(name):
    function = MASKS[name]
    wanted = probes.brute(lambda *i: bool(function(*(torch.tensor(x, dtype=torch.int32) for x in i))), 7, 9, batch=2, heads=2)
    assert torch.equal(probes.table(function, 7, 9, batch=2, heads=2), wanted)


def test_lengths_are_symbols():
    traced = probes.trace(score=lambda s, b, h, q, k: s + (q + flashgen.kv_len - flashgen.q_len - k) * 2)
    p = probes.points(20, 0, torch.float32)
    got = probes.value(traced, traced.form.score, probes.stacked(p))
    assert torch.equal(got, torch.stack([x["s"] + (x["q"] + 4 - x["k"]) * 2 for x in p]))


def test_float_operations_keep_the_users_order():
    order = probes.trace(score=lambda s, b, h, q, k: (s + 1e8) - 1e8)
    s = torch.tensor([1.0, 3.5])
    assert torch.equal(probes.value(order, order.form.score, probes.axes(probes.SIZES, s=s)), (s + 1e8) - 1e8)
    assert [n.op for n in order.form.nodes] == ["s", "number", "add", "number", "sub"]
    associated = probes.trace(score=lambda s, b, h, q, k: s + (1e8 - 1e8))
    assert associated.form != order.form


def test_signed_zeros_and_nans_are_different_constants():
    forms = [probes.trace(score=lambda s, b, h, q, k, c=c: torch.full_like(s, c) / s).form for c in (0.0, -0.0, math.nan, math.inf, -math.inf)]
    zeros = [flashgen.form.linearise(flashgen.language.const(c), None).form for c in (0.0, -0.0)]
    assert zeros[0] != zeros[1] and zeros[0].text != zeros[1].text
    assert all(Form.parse(f.text) == f and hash(Form.parse(f.text)) == hash(f) for f in [*forms, *zeros])


ROLES = {  # name -> (function of the number, values, does a new value keep the Form?)
    "added": (lambda n: lambda s, b, h, q, k: s + n, (0.5, 0.0, -3e8), True),
    "added integer": (lambda n: lambda s, b, h, q, k: s + (q - k + n), (0, 7, -100000), True),
    "multiplied": (lambda n: lambda s, b, h, q, k: s * n * h, (1.0, 0.25, -2.0), True),
    "integer beside a float": (lambda n: lambda s, b, h, q, k: s * n, (1, 2.5), True),
    "compared": (lambda n: lambda s, b, h, q, k: torch.where(q - k <= n, s, NEG), (0, 1023), True),
    "float divisor": (lambda n: lambda s, b, h, q, k: s / n, (30.0, 50, 0.1), True),
    "dividend": (lambda n: lambda s, b, h, q, k: s + n // (k + 1), (30, 50), True),
    "clamp bound": (lambda n: lambda s, b, h, q, k: s.clamp(-n, n), (3.0, 5.0), True),
    "branch value": (lambda n: lambda s, b, h, q, k: torch.where(q > k, s, n), (3.0, 5.0), True),
    "infinity": (lambda n: lambda s, b, h, q, k: torch.where(q > k, s, n), (3.0, NEG), False),
    "integer divisor": (lambda n: lambda s, b, h, q, k: s + q // n, (3, 4), False),
    "modulus": (lambda n: lambda s, b, h, q, k: s + q % n, (3, 4), False),
    "shift": (lambda n: lambda s, b, h, q, k: s + (q >> n), (3, 4), False),
    "exponent": (lambda n: lambda s, b, h, q, k: s**n, (2, 3, 1.5, 2.5), False),
    "base": (lambda n: lambda s, b, h, q, k: n**s, (2.0, 3.0), False),
    "loop count": (lambda n: lambda s, b, h, q, k: functools.reduce(lambda x, _: x + h, range(n), s), (1, 2), False),
    "python condition": (lambda n: lambda s, b, h, q, k: s + h if n > 2 else s, (1, 3), False),
    "constant index": (lambda n: lambda s, b, h, q, k: s + TABLE["row"][k, n], (0, 1), False),
    "open window": (lambda n: flashgen.score(lambda s, b, h, q, k: torch.where(flashgen.sliding_window(n, 0)(b, h, q, k), s, NEG)), (-1, 5), False),
}  # fmt: skip


@pytest.mark.parametrize("role", ROLES)
def test_the_role_of_a_number_decides_whether_it_is_static(role):
    make, values, same = ROLES[role]
    forms = {probes.trace(score=make(n)).form for n in values}
    assert len(forms) == (1 if same else len(values))
    if same:
        slots = [probes.trace(score=make(n)) for n in values]
        assert len({(t.floats, t.ints) for t in slots}) == len(values)


def test_window_sizes_are_run_time_numbers():
    forms = {probes.trace(mask=flashgen.causal & flashgen.sliding_window(n, 0)).form for n in (0, 5, 1023)}
    assert len(forms) == 1
    assert probes.trace(mask=flashgen.sliding_window()).form.mask == -1, "both ends open: no mask at all"


def test_captured_tensors_are_read_at_each_call_also_through_derived_ones():
    base = torch.arange(8.0)
    traced = probes.trace(score=lambda s, b, h, q, k: s + base[k % 8] + (base * 2 + 1)[q % 8] + base.view(2, 4)[1, k % 4])
    symbols = probes.axes({"b": 1, "h": 1, "q": 5, "k": 8}, s=torch.zeros(()))
    q, k = torch.arange(5).view(1, 1, 5, 1), torch.arange(8).view(1, 1, 1, 8)
    for _ in range(2):
        wanted = base[k % 8] + (base * 2 + 1)[q % 8] + base.view(2, 4)[1, k % 4]
        assert torch.equal(probes.value(traced, traced.form.score, symbols), wanted)
        base.mul_(-3)


def test_gradients_flow_through_tensors_derived_inside_the_function():
    base = torch.randn(8, requires_grad=True)
    traced = probes.trace(score=lambda s, b, h, q, k: s + torch.sigmoid(base)[k % 8])
    for _ in range(2):  # a stale graph would fail the second time
        (gradient,) = torch.autograd.grad(probes.value(traced, traced.form.score, probes.axes(probes.SIZES, s=torch.zeros(()))).sum(), base)
        assert gradient.abs().sum() > 0


def test_types_follow_torch():
    kinds = {
        INT: lambda s, b, h, q, k: (q + 3) // 2, LONG: lambda s, b, h, q, k: LONGS[q] + k, SINGLE: lambda s, b, h, q, k: q / 2,
        REAL: lambda s, b, h, q, k: s * 2,
    }  # fmt: skip
    for kind, function in kinds.items():
        with flashgen.language.tracing({}):
            lang = flashgen.language
            assert lang.trace(function, (lang.S, lang.B, lang.H, lang.Q, lang.K), what="score").kind == kind


def test_the_identity_keeps_no_score():
    assert probes.trace(score=lambda s, b, h, q, k: s).form.score == -1


def test_equal_subexpressions_are_one_node():
    form = probes.trace(score=lambda s, b, h, q, k: (s + h) * (s + h)).form
    assert [n.op for n in form.nodes].count("add") == 1


def test_long_chains_do_not_exhaust_the_stack():
    starts = list(range(0, 4000, 4))

    def many(b, h, q, k):
        result = k < 0
        for start in starts:
            result = (k == start) | result
        return result

    form = probes.trace(mask=many).form
    problem = flashgen.problem.Problem("float32", 16, 16)
    assert hooks.make(form, problem).mask
    deep = probes.trace(score=lambda s, b, h, q, k: functools.reduce(lambda x, n: x * 0.5 + n, range(1500), s)).form
    assert hooks.make(deep, flashgen.problem.Problem("float32", 16, 16, which="backward")).score_grad


def test_a_form_survives_its_text():
    traced = probes.trace(score=CAPTURES["index of an index"], mask=MASKS["documents"])
    assert Form.parse(traced.form.text) == traced.form and Form.parse(traced.form.text).nodes == traced.form.nodes


# ---- flashgen.input


def input_variant():
    table, ids = flashgen.input("table", ndim=2), flashgen.input("ids", ndim=1)
    return flashgen.Variant(score=lambda s, b, h, q, k: s + table[h, ids[q]] * torch.sigmoid(table[h, k]), mask=lambda b, h, q, k: ids[q] == ids[k])


def test_inputs_are_known_by_name_before_a_call_and_typed_by_it():
    variant = input_variant()
    assert variant.inputs == {"table": 2, "ids": 1}
    ids = ints(4, 9)
    single, double = (variant.trace({"table": torch.randn(4, 9), "ids": i}) for i in (ids, ids.long()))
    assert single.form != double.form and {c.dtype for c in single.form.captures} == {"float32", "int32"}
    assert variant.trace({"table": torch.randn(4, 30), "ids": ids}) is single, "new sizes need no new trace"
    assert all(c.tensor is None for c in single.captures), "a call's tensors are not kept"


def test_sizes_of_an_input_that_python_consumed_decide_the_trace():
    variant = flashgen.Variant(score=flashgen.relative_bias(flashgen.input("table", ndim=1)))
    radii = [variant.trace({"table": torch.zeros(n)}).ints for n in (9, 5, 9)]
    assert radii[0] == radii[2] != radii[1]
    unrolled = (lambda t: flashgen.Variant(score=lambda s, b, h, q, k: s + (t[q] * t[k]).sum(-1)))(flashgen.input("points", ndim=2))
    assert len({unrolled.trace({"points": torch.zeros(20, n)}).form for n in (3, 4)}) == 2


def test_inputs_are_operands_like_tensors():
    t = flashgen.input("t", ndim=0)
    traced = flashgen.Variant(score=lambda s, b, h, q, k: torch.sigmoid(t) * s + t * 2 - t.exp()).trace({"t": torch.tensor(0.5)})
    assert len(traced.captures) == 1
