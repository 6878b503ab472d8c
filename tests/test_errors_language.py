"""Does everything a score or mask function cannot do raise flashgen's own error, which says what to write instead?"""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import flashgen as fg

T1, T2, T3 = torch.randn(8), torch.randn(4, 8), torch.randn(2, 4, 300)
INTS, COMPLEX = torch.arange(8, dtype=torch.int32), torch.zeros(4, dtype=torch.complex64)
LIST, ARRAY = [1.0, 2.0], np.zeros(8)


def condition(b, h, q, k):
    if q > k:
        return True
    return k < 3


def in_place(s, b, h, q, k):
    s.add_(1)
    return s


def assigned(s, b, h, q, k):
    T1[q] = s
    return s


def assigned_number(s, b, h, q, k):
    s[0] = 1
    return s


def mutates(s, b, h, q, k):
    T1.mul_(1)
    return s + T1[q]


def augmented(s, b, h, q, k):
    t = T1.sum()
    t += s
    return t


# name -> (score function, text of the error)
SCORES = {
    "if": (lambda s, b, h, q, k: s if s > 0 else -s, "torch.where.*instead of `if`"),
    "and": (lambda s, b, h, q, k: torch.where(q > k and k > 2, s, 0), "`&`, `|`, `~` instead of `and`"),
    "& without parentheses": (lambda s, b, h, q, k: torch.where(k <= q & q < 9, s, 0), r"in parentheses, \(a <= b\) & \(c < d\)"),
    "not": (lambda s, b, h, q, k: torch.where(not q, s, 0), "instead of `and`, `or`, `not`"),
    "chained comparison": (lambda s, b, h, q, k: torch.where(0 <= q <= 5, s, 0), r"\(a <= x\) & \(x <= b\) instead of a chained"),
    "membership": (lambda s, b, h, q, k: s if q in (1, 2) else 0, "no truth value"),
    "int()": (lambda s, b, h, q, k: s + int(q), "not a Python number"),
    "float()": (lambda s, b, h, q, k: s + float(q), "not a Python number"),
    "item()": (lambda s, b, h, q, k: s + q.item(), "not a Python number"),
    "math.exp": (lambda s, b, h, q, k: math.exp(s), r"torch.exp, torch.floor\) in place of math"),
    "math.floor": (lambda s, b, h, q, k: math.floor(s), "in place of math"),
    "round()": (lambda s, b, h, q, k: round(s), "not a Python number"),
    "numpy function": (lambda s, b, h, q, k: np.exp(s), "numpy.exp on a traced value: use torch.exp"),
    "numpy where": (lambda s, b, h, q, k: np.where(q > k, s, 0), "numpy on a traced value"),
    "numpy asarray": (lambda s, b, h, q, k: np.asarray(s), "numpy on a traced value"),
    "numpy array operand": (lambda s, b, h, q, k: ARRAY * s, "numpy.multiply on a traced value"),
    "list index": (lambda s, b, h, q, k: s + LIST[h], "index torch tensors rather than lists"),
    "numpy index": (lambda s, b, h, q, k: s + ARRAY[q], r"index a torch tensor, torch.from_numpy\(table\)|rather than lists or numpy arrays"),
    "range": (lambda s, b, h, q, k: sum(s for _ in range(q)), "not a Python number"),
    "iteration": (lambda s, b, h, q, k: sum(x for x in s), "iterated"),
    "iteration over a part": (lambda s, b, h, q, k: sum(x for x in T2[h]), "iterated"),
    "len": (lambda s, b, h, q, k: s + len(s), "no length"),
    "indexing a scalar": (lambda s, b, h, q, k: s[0], "a scalar and cannot be indexed"),
    "indexing a scalar load": (lambda s, b, h, q, k: T1[q][k], "a scalar and cannot be indexed"),
    "float index": (lambda s, b, h, q, k: T1[q * 0.5], "index of type float32: captured tensors are indexed by integers; use // in place of /, or convert"),
    "score index": (lambda s, b, h, q, k: T1[s], "index of type floating point"),
    "bool index": (lambda s, b, h, q, k: T1[q > k], "index of type bool"),
    "new axis": (lambda s, b, h, q, k: T1[q, None], "too many indices|index None"),
    "list of indices": (lambda s, b, h, q, k: T2[[h, q]], "type list"),
    "too many indices": (lambda s, b, h, q, k: s + T1[q, k], r"too many indices: 2 for a captured tensor of shape \(8,\) with 1 dimension\(s\) left"),
    "index out of range": (lambda s, b, h, q, k: s + T2[h, 8], "index 8 is out of range for dimension 1 of size 8"),
    "negative out of range": (lambda s, b, h, q, k: s + T2[-5, q], "index -5 is out of range"),
    "partial slice": (lambda s, b, h, q, k: (T2[1:, q] * s).sum(-1), "only ':' is supported"),
    "element out of range": (lambda s, b, h, q, k: s + T2[h][8], "out of range"),
    "two dimensions left": (lambda s, b, h, q, k: s + T3[b], r"of shape \(2, 4, 300\) is used with 2 dimensions left: index it down"),
    "long dimension left": (lambda s, b, h, q, k: s + T3[b, h].sum(-1), "a trailing dimension of 300 cannot be unrolled: the limit is 256"),
    "lengths that differ": (lambda s, b, h, q, k: s + (T2[h] * T1[:3]).sum(-1), r"different trailing lengths \[3, 8\]"),
    "reduction of a scalar": (lambda s, b, h, q, k: s.sum(-1), "a reduction needs a partly indexed tensor"),
    "reduction of another dimension": (lambda s, b, h, q, k: s + T2[h].sum(1), "reduction over dimension 1"),
    "max over a dimension": (lambda s, b, h, q, k: s + T2[h].max(-1), "use torch.amax"),
    "in place": (in_place, "add_ writes in place"),
    "in place torch": (lambda s, b, h, q, k: torch.relu_(s), "relu_ writes in place"),
    "in place on a captured tensor": (mutates, "mul_ writes in place"),
    "augmented": (augmented, "add_+ writes in place"),
    "assigned": (assigned, "writes in place"),
    "assigned scalar": (assigned_number, "cannot be assigned into"),
    "out=": (lambda s, b, h, q, k: torch.add(s, 1, out=T1), "writes in place"),
    "unknown function": (lambda s, b, h, q, k: torch.fft.fft(s), "torch.fft_fft cannot be traced.*pointwise functions are supported .where"),
    "random": (lambda s, b, h, q, k: torch.rand_like(s), "torch.rand_like cannot be traced"),
    "softmax": (lambda s, b, h, q, k: F.softmax(s, -1), "torch.softmax cannot be traced"),
    "unknown method": (lambda s, b, h, q, k: s.cholesky(), "no attribute 'cholesky'; torch's pointwise"),
    "misspelt method": (lambda s, b, h, q, k: s.tahn(), r"no attribute 'tahn'; close to it: .*\btanh\b"),
    "matmul": (lambda s, b, h, q, k: T2[h] @ T1, r"@ on a traced value|__matmul__|matmul"),
    "wrong arguments": (lambda s, b, h, q, k: torch.round(s, decimals=2), "torch.round with these arguments"),
    "missing argument": (lambda s, b, h, q, k: s.pow(), "torch.pow with these arguments"),
    "rounding mode": (lambda s, b, h, q, k: torch.div(q, 2, rounding_mode="up"), "rounding_mode='up'"),
    "complex number": (lambda s, b, h, q, k: s + 1j, "type complex"),
    "string": (lambda s, b, h, q, k: s + "1", "type str"),
    "huge integer": (lambda s, b, h, q, k: s + 2**70, "does not fit 64 bits"),
    "division by zero": (lambda s, b, h, q, k: s + q // 0, "// by zero"),
    "modulo zero": (lambda s, b, h, q, k: s + q % 0, "% by zero"),
    "negative shift": (lambda s, b, h, q, k: s + (q >> -1), "shift by -1"),
    "float shift": (lambda s, b, h, q, k: s + (s >> 1), "shifts need integers"),
    "bits of a float": (lambda s, b, h, q, k: s & 1, "bitwise and of floating point values"),
    "inverted float": (lambda s, b, h, q, k: ~s, "~ of a floating point value"),
    "negated bool": (lambda s, b, h, q, k: -(q > k), "- of a boolean"),
    "bools subtracted": (lambda s, b, h, q, k: (q > k) - (h > 0), "subtraction of two booleans"),
    "integer power": (lambda s, b, h, q, k: s + 10**h, "an integer to a traced integer power"),
    "infinite integer": (lambda s, b, h, q, k: torch.full_like(q, math.inf), "cannot be converted to an integer"),
    "conversion to complex": (lambda s, b, h, q, k: s.to(torch.complex64), "conversion to complex64"),
    "complex capture": (lambda s, b, h, q, k: s + COMPLEX[h], "captured tensor of dtype complex64"),
    "condition": (lambda s, b, h, q, k: k <= q, r"returned a condition, not its new score: pass it as mask="),
    "None": (lambda s, b, h, q, k: None, "the score function returned None: it must return its new score"),
    "vector": (lambda s, b, h, q, k: s + T2[h], "the score function returned a vector of 8 values"),
    "tuple": (lambda s, b, h, q, k: (s, s), "type tuple"),
    "too few parameters": (lambda s, b, h, q: s, r"must take f\(score, b, h, q_idx, kv_idx\)"),
    "too many parameters": (lambda s, b, h, q, k, extra: s, "further parameters need defaults"),
    "factory": (fg.softcap, r"softcap is a factory: call it, softcap\(cap\)"),
    "no function": (3.0, "a score must be a function .* not float"),
    "a mask": (fg.causal, "is a mask, given where a score is wanted: pass it as mask="),
}  # fmt: skip


def message_of(build) -> str:
    with pytest.raises(fg.FlashgenError) as caught:
        build()
    return str(caught.value)


@pytest.mark.parametrize("name", SCORES)
def test_what_a_score_function_cannot_do(name):
    function, text = SCORES[name]
    message = message_of(lambda: fg.Variant(score=function))
    assert re.search(text, message), message


MASKS = {
    "if": (condition, "no truth value"),
    "float result": (lambda b, h, q, k: (q - k) * 0.5, r"the mask function returned a floating point value: it must return a condition. Compare it \(x > 0\)"),
    "additive mask": (lambda b, h, q, k: torch.where(q >= k, 0.0, -math.inf), "a mask selects; add a bias as a score"),
    "None": (lambda b, h, q, k: None, "the mask function returned None: it must return its condition"),
    "vector": (lambda b, h, q, k: T2[h] > 0, "the mask function returned a vector"),
    "score signature": (lambda s, b, h, q, k: s, r"must take f\(b, h, q_idx, kv_idx\)"),
    "a score": (fg.softcap(3.0), "is a score, given where a mask is wanted: pass it as score="),
    "factory": (fg.sliding_window, r"sliding_window is a factory: call it, sliding_window\(left, right\)"),
    "a tensor": (T1, "must be a function"),
    "a string": ("causal", "must be a function .* not str"),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_what_a_mask_function_cannot_do(name):
    function, text = MASKS[name]
    message = message_of(lambda: fg.Variant(mask=function))
    assert re.search(text, message), message


OTHERS = {
    "and of masks": (lambda: fg.causal and fg.dilated(2), "compose masks with & | ~"),
    "not of a mask": (lambda: not fg.causal, "compose masks with & | ~"),
    "and of scores": (lambda: fg.softcap(3.0) and fg.alibi(), "chain scores with >>"),
    "mask and number": (lambda: fg.causal & 3, "must be a function"),
    "mask and score": (lambda: fg.causal | fg.softcap(3.0), "is a score, given where a mask is wanted"),
    "score and mask": (lambda: fg.softcap(3.0) >> fg.causal, "is a mask, given where a score is wanted"),
    "head_dim": (lambda: fg.Variant(head_dim=577), "head_dim=577: the limit is 1..576.*Split the heads"),
    "head_dim pair": (lambda: fg.Variant(head_dim=(64, 64, 64)), "a pair"),
    "head_dim function": (lambda: fg.Variant(lambda b, h, q, k: k <= q), "Did you mean mask= or score="),
    "head_dim mask": (lambda: fg.Variant(fg.causal), "mean mask="),
    "head_dim float": (lambda: fg.Variant(head_dim=64.0), "head_dim=64.0: an int"),
    "scale": (lambda: fg.Variant(scale=math.nan), "must be finite"),
    "scale string": (lambda: fg.Variant(scale="x"), "any finite float"),
    "sink tensor": (lambda: fg.Variant(sink=T1), r"sink is True or False; the tensor is given at each call"),
    "input without a name": (lambda: fg.input("", ndim=1), "needs a name"),
    "input rank": (lambda: fg.input("x", ndim=-1), "number of dimensions"),
    "indexing outside": (lambda: fg.input("x", ndim=1)[0], "only inside a score or mask function"),
    "window": (lambda: fg.sliding_window(-2, 0), r"sliding_window\(left\)=-2: an integer of at least -1"),
    "window float": (lambda: fg.sliding_window(2.5), "an integer"),
    "prefix": (lambda: fg.prefix_lm(-1), "at least 0"), "prefix rank": (lambda: fg.prefix_lm(INTS.view(2, 4)), "1 dimension"),
    "prefix dtype": (lambda: fg.prefix_lm(T1), "dtype float32 is not supported"),
    "document": (lambda: fg.document([0, 1]), "a torch tensor .* is wanted, not list"), "document dtype": (lambda: fg.document(T1), "dtype float32"),
    "chunked": (lambda: fg.chunked(0), "at least 1"), "dilated": (lambda: fg.dilated(True), "dilated.step.=True"),
    "padding": (lambda: fg.padding(3), "a torch tensor"), "global": (lambda: fg.global_tokens(T1), "dtype float32"),
    "neighborhood axes": (lambda: fg.neighborhood((4, 4), (3, 3, 3)), "shape has 2 axes, window 3"),
    "neighborhood window": (lambda: fg.neighborhood((4, 4), 5), "window 5 . dilation 1 does not fit an axis of 4"),
    "blocks": (lambda: fg.block_sparse(INTS, 16), "dtype int32"), "block size": (lambda: fg.block_sparse(T1 > 0, 0), "at least 1"),
    "dense": (lambda: fg.from_dense(T2), "must be bool .* score=flashgen.bias"),
    "dense rank": (lambda: fg.from_dense(torch.ones(1, 1, 1, 1, 1).bool()), "dimension"),
    "softcap": (lambda: fg.softcap(0), "a positive number"), "softcap nan": (lambda: fg.softcap(math.nan), "finite"),
    "softcap text": (lambda: fg.softcap("3"), "a finite number"),
    "alibi": (lambda: fg.alibi(INTS), "dtype int32"), "alibi rank": (lambda: fg.alibi(T3), "1 or 2 dimension"),
    "bias": (lambda: fg.bias(T2 > 0), "must be floating. Pass a boolean mask as mask=flashgen.from_dense"),
    "relative": (lambda: fg.relative_bias(T1), "2R . 1, an odd number; got 8"), "t5": (lambda: fg.t5_bias(T1), "2 dimension"),
    "t5 distance": (lambda: fg.Variant(score=fg.t5_bias(torch.zeros(32, 4), max_distance=8)), "max_distance must exceed the 8 exact distances"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_cannot_be_composed_or_given(name):
    build, text = OTHERS[name]
    message = message_of(build)
    assert re.search(text, message, re.S), message


def test_kinds_are_also_python_errors():
    with pytest.raises(ValueError):
        fg.Variant(head_dim=1024)
    with pytest.raises(TypeError):
        fg.from_dense(T2)
    assert not hasattr(fg.language.S, "cholesky"), "an unknown attribute stays an AttributeError"


def test_errors_of_the_users_own_code_pass_through():
    def broken(s, b, h, q, k):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fg.Variant(score=broken)


def test_min_and_max_are_pythons_own_again_after_a_failed_trace():
    before = min, max
    message_of(lambda: fg.Variant(score=lambda s, b, h, q, k: s if s else -s))
    assert (min, max) == before and min(3, 1) == 1


def test_a_mistake_with_an_input_names_it():
    t = fg.input("table", ndim=1)
    variant = fg.Variant(score=lambda s, b, h, q, k: s + T1[t[q]])  # fine once the tensor is an integer one
    assert variant.inputs == {"table": 1} and variant.trace({"table": INTS}).form.score > 0
    assert "table" in message_of(lambda: variant.trace({}))
    assert "index of type floating point" in message_of(lambda: variant.trace({"table": T1}))
    assert "ndim=1): the tensor has 2 dimensions" in message_of(lambda: variant.trace({"table": T2}))
