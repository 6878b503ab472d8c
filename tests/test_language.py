"""Does a score or mask function mean the same traced as called by torch, and what is static in its Form?

Every construct is compared at random points: the Form evaluated against the very Python function on 0-d tensors, in float32 and float64.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import probes
import pytest
import torch
import torch.nn.functional as F

import flashgen
from flashgen import hooks
from flashgen.language import INT, LONG, REAL, SINGLE
from flashgen.form import Form

G = torch.Generator().manual_seed(3)
NEG = float("-inf")


def floats(*shape):
    return torch.randn(shape, generator=G, dtype=torch.float64)


def ints(high, *shape, dtype=torch.int32, low=0):
    return torch.randint(low, high, shape, generator=G).to(dtype)


TABLE = {"t": floats(4, 40), "u": floats(2, 4, 19), "row": floats(23, 3), "w": floats(3), "zero_d": floats(), "f16": floats(4).half(), "bf": floats(4).bfloat16()}
IDS, DOC, LONGS = ints(19, 23), ints(4, 2, 23), ints(1000, 23, dtype=torch.int64, low=-1000)
FLAGS, BYTES, OFFSETS = ints(2, 23, dtype=torch.bool), ints(200, 23, dtype=torch.uint8), ints(9, dtype=torch.int64)


class Slope:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, s, b, h, q, k):
        return s - self.factor * (q - k)


def partial_target(factor, s, b, h, q, k):
    return s * factor + h


def with_defaults(s, b, h, q, k, factor=0.75, table=TABLE["t"]):
    return s * factor + table[h, k]


INDICES = {
    "add sub neg": lambda s, b, h, q, k: s + (q - k) - (-h) + (+b),
    "reflected": lambda s, b, h, q, k: 3 - q + 2 * k + s * (5.0 - s),
    "floordiv of negatives": lambda s, b, h, q, k: s + (q - k) // 3 + (k - q) // 8,
    "mod of negatives": lambda s, b, h, q, k: s + (q - k) % 5 + (k - q) % 4,
    "negative divisor": lambda s, b, h, q, k: s + (q - k) // -3 + (q - k) % -5,
    "traced divisor": lambda s, b, h, q, k: s + torch.div(q - 9, k + 1, rounding_mode="floor") + (q - 9) % (k + 1),
    "truncated division": lambda s, b, h, q, k: s + torch.div(q - k, 3, rounding_mode="trunc") + torch.div(q - k, 2.5, rounding_mode="trunc"),
    "fmod of integers": lambda s, b, h, q, k: s + torch.fmod(q - k, 3),
    "floor division by a float": lambda s, b, h, q, k: s + (q - k) // 2.5 + s // 0.75,
    "mod by a float": lambda s, b, h, q, k: s % 0.75 + (q - k) % 2.5 + torch.remainder(s, -0.5) + torch.fmod(s, 0.3),
    "true division": lambda s, b, h, q, k: s + (q - k) / 7 + 1 / (k + 1) + s / (h + 1),
    "shifts": lambda s, b, h, q, k: s + ((q - k) >> 2) + (k << 3) + (1 << h),
    "bits": lambda s, b, h, q, k: s + ((q - k) & 7) + (q | 5) + (k ^ q) + (~q) + ((q - k) & 6),
    "powers": lambda s, b, h, q, k: s**2 + (q - k) ** 3 + s**3 + (s * s + 1) ** 0.5 + (s * s + 1) ** -1.5 + s**0 + 2**h + 2.0 ** (-h),
    "abs": lambda s, b, h, q, k: s.abs() + abs(q - k) + torch.abs(s - 1),
    "min max": lambda s, b, h, q, k: min(s, 1.0) + max(q, k, 5) + min((q, k)) + max(s, q - k),
    "python functions of numbers": lambda s, b, h, q, k: s + max(2, 3) * min([4, 1]) + math.exp(0.5) + sum([q, k]),
    "python loops": lambda s, b, h, q, k: functools.reduce(lambda x, n: x + n * h, range(4), s),
    "comparisons": lambda s, b, h, q, k: torch.where((q < k) | (q >= k + 3) | (s > 0.5), s, torch.where(q == k, 1.0, torch.where(q != h, 2.0, s * 2))),
    "chained condition": lambda s, b, h, q, k: torch.where((q <= k) & (k <= q + 4) & ~(h == 1), s, NEG),
    "bool arithmetic": lambda s, b, h, q, k: s + (q > k) * 2.0 + (q > k) + ((q > k) + (h == 0)) * (k > 3) + (q > k) * h,
    "bool xor": lambda s, b, h, q, k: torch.where((q > k) ^ (h == 0), s, 0.0) + torch.logical_xor(q > k, b > 0),
    "bool compared": lambda s, b, h, q, k: torch.where((q > k) == (h > 1), s, -s),
    "logical functions": lambda s, b, h, q, k: torch.where(torch.logical_and(torch.logical_not(q), k) | torch.logical_or(q > 4, s), s, 7.0),
    "conversions": lambda s, b, h, q, k: s.to(torch.int32) + (q - k).to(torch.float32) * 0.5 + (q > k).to(torch.int64) + s.to(s.dtype) + q.type(torch.int64),
    "conversion methods": lambda s, b, h, q, k: s.long() + s.int() + s.bool() + (q - k).float() / 3 + (q - k).to(s) + q.type_as(s),
    "floor ceil round trunc": lambda s, b, h, q, k: s.floor() + torch.ceil(s) + torch.round(s * 2.5) + torch.trunc(s) + (q - k).floor(),
    "compiler constants": lambda s, b, h, q, k: torch.where(s == 0.0, torch.zeros_like(s), s) + torch.ones_like(q) + torch.full_like(s, 2.5),
    "infinities": lambda s, b, h, q, k: torch.where(k > q, -math.inf, s) + torch.where(q == k, math.inf, 0.0),
    "numpy numbers": lambda s, b, h, q, k: np.float64(0.5) * s + np.int64(3) + s * np.float32(0.25) + np.float64(2.0) - q,
    "large integers": lambda s, b, h, q, k: torch.where((q.long() + 2**40) * 3 > (k.long() + 2**40) * 3, s, -s),
    "detach clone": lambda s, b, h, q, k: s.detach() + s.clone() + s.contiguous(),
}  # fmt: skip
FLOATING = {
    name: lambda s, b, h, q, k, f=f: f(s)
    for name, f in {
        "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1, "tanh": torch.tanh, "sin": torch.sin, "cos": lambda s: s.cos(), "tan": lambda s: (s * 0.3).tan(),
        "atan": torch.atan, "sinh": torch.sinh, "cosh": torch.cosh, "erf": torch.erf, "erfc": torch.erfc, "sigmoid": torch.sigmoid, "expit": torch.special.expit,
        "logs": lambda s: torch.log(s.abs() + 1) + torch.log2(s.abs() + 1) + torch.log1p(s.abs()) + torch.log10(s.abs() + 1),
        "roots": lambda s: torch.sqrt(s.abs()) + torch.rsqrt(s.abs() + 0.1), "asin acos": lambda s: torch.asin(torch.tanh(s)) + torch.acos(torch.tanh(s)),
        "atan2": lambda s: torch.atan2(s, s * s - 1), "square": torch.square, "reciprocal": lambda s: torch.reciprocal(s + 7), "sign": lambda s: torch.sign(s) + s.sgn(),
        "clamp": lambda s: s.clamp(-1, 0.5) + torch.clamp(s, min=0) + s.clip(max=1.0) + s.clamp_min(0.25) + s.clamp_max(0.75),
        "minimum": lambda s: torch.minimum(s, s * s) + torch.maximum(s, -s) + torch.fmin(s, s * s) + torch.fmax(s, -s),
        "relu": lambda s: torch.relu(s) + F.relu(s - 1) + F.relu6(s * 5) + F.leaky_relu(s) + F.elu(s) + F.hardtanh(s),
        "gelu": lambda s: F.gelu(s) + F.gelu(s, approximate="tanh"), "silu": F.silu, "softplus": lambda s: F.softplus(s) + F.logsigmoid(s) + F.softplus(s, beta=2),
        "mish": lambda s: F.mish(s) + F.softsign(s) + F.tanhshrink(s), "pow": lambda s: torch.pow(s.abs(), 1.5) + torch.pow(s, 2) + torch.pow(2.0, s),
        "isnan": lambda s: torch.where(torch.isnan(s / s), 1.0, s) + torch.where(torch.isinf(1 / s), 2.0, 0.0) + torch.where(torch.isfinite(1 / s), 1.0, 0.0),
        "nan_to_num": lambda s: torch.nan_to_num(s / s, nan=3.0), "lerp": lambda s: torch.lerp(s, s * s, 0.25), "logaddexp": lambda s: torch.logaddexp(s, s * 2),
        "hypot": lambda s: torch.hypot(s, s + 1), "frac": torch.frac, "addcmul": lambda s: torch.addcmul(s, s, s, value=0.5), "add alpha": lambda s: torch.add(s, s, alpha=3),
        "rsub": lambda s: torch.rsub(s, 3), "logit": lambda s: torch.logit(torch.sigmoid(s)),
    }.items()
}  # fmt: skip
CAPTURES = {
    "indexing": lambda s, b, h, q, k: s + TABLE["t"][h, k] + TABLE["u"][b, h, q],
    "relative index": lambda s, b, h, q, k: s + TABLE["t"][h, (q - k).clamp(-10, 10) + 10],
    "chained indexing": lambda s, b, h, q, k: s + TABLE["u"][b][h][q] + TABLE["u"][b, h][q] + TABLE["u"][1][h, q],
    "index of an index": lambda s, b, h, q, k: s + TABLE["t"][h, IDS[k]] + TABLE["row"][IDS[IDS[k]], 1],
    "negative constants": lambda s, b, h, q, k: s + TABLE["u"][-1, -2, q] + TABLE["w"][-1],
    "ellipsis and colons": lambda s, b, h, q, k: s + TABLE["u"][..., q][b, h] + TABLE["u"][:, h][b, q] + TABLE["u"][:, :, q][b][h],
    "partial indexing": lambda s, b, h, q, k: s + (TABLE["row"][q] * TABLE["row"][k]).sum(-1) + (TABLE["row"][q] - TABLE["row"][k]).square().sum(dim=-1),
    "partial and a vector": lambda s, b, h, q, k: s + (TABLE["row"][q] * TABLE["w"]).sum() + torch.dot(TABLE["row"][k], TABLE["w"]) + TABLE["row"][q].mean(),
    "other reductions": lambda s, b, h, q, k: TABLE["row"][q].amax(-1) + TABLE["row"][q].amin(-1) + TABLE["row"][k].prod(-1) + TABLE["row"][k].max() * s,
    "counting": lambda s, b, h, q, k: s + (TABLE["row"][q] > TABLE["row"][k]).sum(-1) + torch.any(TABLE["row"][q] > 0) + (TABLE["row"][k] > -1).all(-1),
    "element of a part": lambda s, b, h, q, k: s + TABLE["row"][q][1] + TABLE["row"][q][-1] + TABLE["row"][k][1:].sum(-1),
    "leading dimension left": lambda s, b, h, q, k: s + TABLE["row"].T[:, q].sum(0),
    "0-d": lambda s, b, h, q, k: s * TABLE["zero_d"] + OFFSETS,
    "half precisions": lambda s, b, h, q, k: s + TABLE["f16"][h].to(s.dtype) * TABLE["bf"][h].to(s.dtype),
    "int64": lambda s, b, h, q, k: s + LONGS[k] // 7 + LONGS[q] % 16 + (LONGS[q] - LONGS[k]) + torch.where(LONGS[k] > q, 1, 0),
    "bool and uint8": lambda s, b, h, q, k: torch.where(FLAGS[q] | FLAGS[k], s, 0.0) + BYTES[k].to(torch.int32) * 2 + BYTES[q] + FLAGS[q],
    "derived inside": lambda s, b, h, q, k: s + (TABLE["t"] * 2)[h, k] + torch.softmax(TABLE["t"], -1)[h, q] + TABLE["row"][:, 1][q] + TABLE["zero_d"].exp(),
    "derived tuples": lambda s, b, h, q, k: s + TABLE["row"].unbind(1)[2][q] + torch.max(TABLE["t"], dim=1)[0][h] + TABLE["t"].sort(-1).values[h, k],
    "made inside": lambda s, b, h, q, k: s + torch.arange(40)[k] * 0.5 + torch.tensor(0.25, dtype=torch.float64, device=s.device),
    "sizes": lambda s, b, h, q, k: s / TABLE["t"].shape[0] + TABLE["t"].size(1) + len(TABLE["w"]),
    "closure": lambda s, b, h, q, k: (lambda factor: s * factor)(TABLE["w"][0]),
    "partial": functools.partial(partial_target, 0.5), "callable object": Slope(0.125), "defaults": with_defaults,
    "mask inside a score": lambda s, b, h, q, k: torch.where(flashgen.causal_top_left(b, h, q, k), s, NEG),
}  # fmt: skip
CONSTRUCTS = INDICES | FLOATING | CAPTURES


@pytest.mark.parametrize("real", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_a_construct_means_the_same_traced_as_called(name, real, monkeypatch):
    for key, tensor in TABLE.items():  # FlexAttention's captured floats have the dtype of the scores
        monkeypatch.setitem(TABLE, key, tensor.to(real) if tensor.dtype == torch.float64 else tensor)
    if name == "defaults":
        function = functools.partial(with_defaults, table=TABLE["t"])
    else:
        function = CONSTRUCTS[name]
    traced = probes.trace(score=function)
    found = probes.points(60, seed=len(name), real=real)
    got = probes.value(traced, traced.form.score, probes.stacked(found), real)
    wanted = torch.stack([torch.as_tensor(function(p["s"], p["b"], p["h"], p["q"], p["k"])).to(real) for p in found])
    # made of other operations than torch's own, or vectors and single numbers taking different paths in torch
    loose = name in FLOATING or name in ("powers", "partial and a vector")
    tolerance = (3e-6 if real == torch.float32 else 1e-13) if loose else 0.0
    torch.testing.assert_close(got.expand(wanted.shape), wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


MASKS = {
    "bool capture": lambda b, h, q, k: FLAGS[q] | ~FLAGS[k],
    "integer as condition": lambda b, h, q, k: (q - k) & 4,
    "float comparison": lambda b, h, q, k: (q / 8 - k / 8).abs() <= 1,
    "float capture": lambda b, h, q, k: TABLE["t"][h, k] > 0.1,
    "documents": lambda b, h, q, k: (DOC[b][q] == DOC[b][k]) & (q >= k),
    "int64": lambda b, h, q, k: LONGS[q] <= LONGS[k],
    "partial": lambda b, h, q, k: (TABLE["row"][q] * TABLE["row"][k]).sum(-1) > 0,
    "any": lambda b, h, q, k: (TABLE["row"][q] > TABLE["row"][k]).any(-1),
    "number": lambda b, h, q, k: 1, "false": lambda b, h, q, k: False, "numpy bool": lambda b, h, q, k: np.True_,
}  # fmt: skip


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
        INT: lambda s, b, h, q, k: (q + 3) // 2, LONG: lambda s, b, h, q, k: LONGS[q] + k, SINGLE: lambda s, b, h, q, k: q / 2, REAL: lambda s, b, h, q, k: s * 2,
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
