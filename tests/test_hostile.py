"""Do odd, hostile and unlucky inputs give the right numbers or flashgen's own error: never a crash, a stale value or a silently missing gradient?

Each test is a kind of fault that was found by trying to break the public interface. Everything runs on the CPU, in float64 unless the dtype matters.
"""

from __future__ import annotations

import copy
import functools
import operator
import shutil

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad, grad

import flashgen as fg
from flashgen import Variant
from flashgen.analysis import analyze
from flashgen.build import host_compiler
from flashgen.interval import may_wrap
from flashgen.reference import reference


def qkv(q_len=9, kv_len=13, dtype=torch.float64, requires_grad=False, dim=8):
    torch.manual_seed(0)
    shapes = ((2, 4, q_len, dim), (2, 2, kv_len, dim), (2, 2, kv_len, dim))
    return [torch.randn(s, dtype=torch.float64).to(dtype).requires_grad_(requires_grad) for s in shapes]


def close(a, b):
    torch.testing.assert_close(a.double(), b.double(), rtol=1e-9, atol=1e-9)


def check(variant, q_len=9, kv_len=13, kernel=None, **call):
    """lse too: a term that is equal for all keys of a row leaves the output as it is."""
    q, k, v = qkv(q_len, kv_len)
    out, aux = (kernel or fg.compile(variant))(q, k, v, return_aux=True, **call)
    wanted, lse, _ = reference(variant, q, k, v, **call)
    close(out, wanted), close(aux.lse, lse)


def negated(t):
    """A view with t's values whose memory holds the negated ones, as imaginary parts of conjugates do."""
    return torch._neg_view(-t.detach())


# ---- tensors whose memory is not what they read as


def test_negated_views():
    q, k, v = qkv(requires_grad=True)
    table, used = torch.randn(9, 13, dtype=torch.float64), torch.tensor([5, 11], dtype=torch.int32)
    sink = torch.randn(4, dtype=torch.float64)
    kernel = fg.compile(Variant(score=fg.bias(table), sink=True))
    turned = fg.compile(Variant(score=fg.bias(negated(table)), sink=True))
    wanted = kernel(q, k, v, sink=sink, seqlens_k=used)
    out = turned(*(negated(t).requires_grad_() for t in (q, k, v)), sink=negated(sink), seqlens_k=torch._neg_view(-used))
    close(out, wanted)
    dout = torch.randn_like(out)
    for a, b in zip(grad(wanted, (q, k, v), negated(dout), retain_graph=True), grad(wanted, (q, k, v), dout)):
        close(a, b)


def test_zeros_without_memory():
    q, k, v = qkv(requires_grad=True)
    zeros = torch._efficientzerotensor(q.shape, dtype=q.dtype)
    kernel = fg.compile(Variant())
    close(kernel(zeros, k.detach(), v.detach()), kernel(torch.zeros_like(q), k, v))
    out = kernel(q, k, v)
    assert all(g.count_nonzero() == 0 for g in grad(out, (q, k, v), torch._efficientzerotensor(out.shape, dtype=out.dtype)))
    table = torch._efficientzerotensor((4,))
    check(Variant(score=lambda s, b, h, i, j: s + table[h]))


def test_layouts_without_strides_are_refused():
    q, k, v = qkv(dtype=torch.float32)
    kernel = fg.compile(Variant())
    kernel(q, k, v)  # dense tensors of these shapes are known to be good
    for wrong in (q.to_sparse(), q.to_mkldnn()):
        with pytest.raises(fg.VariantError, match="layout"):
            kernel(wrong, k, v)
    with pytest.raises(fg.VariantError, match="nested"):
        kernel(torch.nested.nested_tensor([q[0], q[1]]), k, v)
    table = torch.ones(4).to_sparse()
    with pytest.raises(fg.VariantError, match="layout"):
        fg.compile(Variant(score=lambda s, b, h, i, j: s + table[h]))(q, k, v)


# ---- captured tensors that change under their name


class Learned(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(9, 13))
        self.kernel = fg.compile(Variant(score=fg.bias(self.table)))


@pytest.mark.parametrize("convert", ["half", "bfloat16", "double"])
@pytest.mark.parametrize("copied", [False, True])
def test_a_module_changes_its_dtype(convert, copied):
    module = copy.deepcopy(Learned()) if copied else Learned()
    module.kernel(*qkv())
    getattr(module, convert)()
    check(Variant(score=fg.bias(module.table)), kernel=module.kernel)


@pytest.mark.parametrize("shape", [(1, 13), (4, 9, 13), (13,)])
def test_a_captured_tensor_changes_its_shape(shape):
    table = torch.nn.Parameter(torch.randn(9, 13))
    kernel = fg.compile(Variant(score=fg.bias(table)))
    kernel(*qkv())
    table.data = torch.randn(shape)
    check(Variant(score=fg.bias(table)), kernel=kernel)


def test_captured_integers_change_their_type():
    ids = torch.tensor([0, 1] * 7, dtype=torch.int32)
    kernel, module = fg.compile(Variant(mask=fg.document(ids))), fg.compile(Variant(mask=fg.document(ids)))
    copied = copy.deepcopy(module)
    ids.data = ids.data.long() * 2**40
    check(Variant(mask=fg.document(ids)), kernel=kernel)
    copied.variant.plain.captures[0].tensor.data = ids.data
    with pytest.raises(fg.VariantError, match="make its Variant anew"):
        copied(*qkv())


@pytest.mark.parametrize("read", [lambda t: t.item(), float, lambda t: t.tolist(), lambda t: t.numpy().max()], ids=["item", "float", "tolist", "numpy"])
def test_values_that_python_read_do_not_go_stale(read):
    factor = torch.tensor(0.5)
    kernel = fg.compile(Variant(score=lambda s, b, h, i, j: s * read(factor)))
    kernel(*qkv())
    factor.fill_(2.0)
    check(Variant(score=lambda s, b, h, i, j: s * 2.0), kernel=kernel)


def test_positive_and_negative_zero_are_two_numbers():
    for zero in (0.0, -0.0):
        check(Variant(score=lambda s, b, h, i, j: s + torch.clamp(1.0 / (h * 0.0 + (zero - 0.0 * (h + 1.0))), -1, 1)))  # noqa: B023 - called at once


# ---- derivatives


@pytest.mark.parametrize("other", ["sink", "lse"])
def test_a_second_derivative_is_refused_through_every_argument(other):
    q, k, v = qkv(requires_grad=True)
    x = torch.randn(4 if other == "sink" else (2, 4, 9), dtype=q.dtype, requires_grad=True)
    call = {"sink": x} if other == "sink" else {}
    out, aux = fg.compile(Variant(sink=other == "sink"))(q, k, v, return_aux=True, **call)
    value = out.sum() if other == "sink" else (aux.lse * x).sum()
    first = grad(value, q, create_graph=True)[0]
    with pytest.raises(fg.VariantError, match="second derivative"):
        grad(first.sum(), x, allow_unused=True)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_forward_mode_is_refused(requires_grad):
    q, k, v = qkv(requires_grad=requires_grad)
    with forward_ad.dual_level(), pytest.raises(fg.VariantError, match="forward-mode"):
        fg.compile(Variant())(forward_ad.make_dual(q, torch.ones_like(q)), k, v)


def test_function_transforms_are_refused():
    q, k, v = qkv()
    kernel = fg.compile(Variant())
    transforms = (
        lambda: torch.func.jvp(lambda x: kernel(x, k, v), (q,), (q,)),
        lambda: torch.func.grad(lambda x: kernel(x, k, v).sum())(q),
        lambda: torch.vmap(lambda a, b, c: kernel(a[None], b[None], c[None]))(q, k, v),
    )
    for transform in transforms:
        with pytest.raises(fg.VariantError, match=r"torch\.func"):
            transform()


# ---- integers at the ends of their types

INT_LEAST, INT_MOST = -(2**31), 2**31 - 1
_TABLE = torch.tensor([0, 5, INT_MOST, INT_LEAST, -1, 7] * 20, dtype=torch.int32)
_LONGS = torch.tensor([0, 5, 2**63 - 1, -(2**63), -1, 2**31] * 20)
WRAPPING = {
    "sum": lambda b, h, i, j: (i + 2147483600) <= (j + 2147483600),
    "number": lambda b, h, i, j: (i + INT_MOST) >= 0,
    "product": lambda b, h, i, j: i * 1000003 * 1000003 >= j,
    "negation": lambda b, h, i, j: -_TABLE[i] < j,
    "absolute value": lambda b, h, i, j: abs(_TABLE[i]) < j,
    "difference of entries": lambda b, h, i, j: _TABLE[i] - _TABLE[j] < 1,
    "long": lambda b, h, i, j: -_LONGS[i] < j,
    "long product": lambda b, h, i, j: (i * 3000000019) * (j * 3000000019) >= 0,
    "long to int": lambda b, h, i, j: _LONGS[i].to(torch.int32) > j,
    "shift": lambda b, h, i, j: (i << 28) >= 0,
    "shift by more than the width": lambda b, h, i, j: (i << (j - 5)) > 100,
    "shift right": lambda b, h, i, j: ((i - 30) >> (j - 5)) >= 0,
    "product of lengths": lambda b, h, i, j: i * fg.kv_len + j < 500,
}


@pytest.mark.parametrize("name", WRAPPING)
def test_integers_wrap_around_in_tiles_as_in_elements(name):
    check(Variant(mask=WRAPPING[name]), 70, 90)


def test_the_least_integer_divided_by_minus_one_does_not_trap():
    least, minus = torch.full((13,), INT_LEAST, dtype=torch.int32), torch.full((13,), -1, dtype=torch.int32)

    def mask(b, h, i, j):
        quotients = (least[i] // minus[j]) ^ torch.div(least[i], minus[j], rounding_mode="trunc")
        return (quotients == 0) & (least[i] % minus[j] == 0) & (torch.fmod(least[i], minus[j]) == 0)

    q, k, v = qkv()
    close(fg.compile(Variant(mask=mask))(q, k, v), fg.compile(Variant())(q, k, v))


@pytest.mark.parametrize("size", [2**30, 2**31 - 1, 2**31, 2**63 - 1, 10**30])
def test_windows_wider_than_any_length_are_open(size):
    q, k, v = qkv()
    close(fg.compile(Variant(mask=fg.sliding_window(size, size)))(q, k, v), fg.compile(Variant())(q, k, v))


def test_usual_masks_are_known_not_to_wrap():
    for mask in (fg.causal, fg.sliding_window(1023, 0), fg.prefix_lm(5) | fg.dilated(3), fg.chunked(64), fg.neighborhood((8, 8), 3)):
        assert not may_wrap(Variant(mask=mask).plain.form)


# ---- size of the program


def nested(b, h, i, j):
    for n in range(600):
        i = torch.minimum(i + 1, j + n)
    return i >= j


LONG = {
    "or": functools.reduce(operator.or_, [fg.mask(lambda b, h, i, j, n=n: j == n) for n in range(600)]),
    "and": functools.reduce(operator.and_, [fg.mask(lambda b, h, i, j, n=n: j != n) for n in range(600)]),
    "minima": nested,
    "sum": lambda b, h, i, j: functools.reduce(lambda x, n: x + 1, range(1000), i) >= j,
}


@pytest.mark.parametrize("name", LONG)
def test_long_chains(name):
    assert analyze(Variant(mask=LONG[name]).plain.form).kv_text


# ---- torch.compile


def test_lengths_on_the_cpu_are_read_by_the_operator_in_a_compiled_graph():
    kernel = fg.compile(Variant(mask=fg.causal))
    q, k, v = qkv(9, 9)
    used = lambda lengths: kernel(q, k, v, seqlens_k=lengths)  # noqa: E731
    compiled = torch.compile(used, fullgraph=True, backend="aot_eager")
    lengths = torch.tensor([3, 9], dtype=torch.int32)
    close(compiled(lengths), used(lengths))
    with pytest.raises(fg.ShapeError, match="seqlens_k holds 10"):
        compiled(torch.tensor([3, 10], dtype=torch.int32))
    rows = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    packed = lambda cu: kernel.varlen(*rows, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=6, max_seqlen_k=6)  # noqa: E731
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    offsets = torch.tensor([0, 3, 9], dtype=torch.int32)
    close(compiled(offsets), packed(offsets))
    for wrong, what in (([0, 3, 90], "end within"), ([0, 2, 9], "longest sequence")):
        with pytest.raises(fg.ShapeError, match=what):
            compiled(torch.tensor(wrong, dtype=torch.int32))


# ---- what was written

_T = torch.randn(1, 1, 4, 8)
ERRORS = {
    "scale beyond a float": lambda: Variant(scale=10**400),
    "scale as text": lambda: Variant(scale="0.5"),
    "scale that would lose its gradient": lambda: Variant(scale=torch.tensor(0.5, requires_grad=True)),
    "softcap beyond a float": lambda: Variant(score=fg.softcap(10**400)),
    "exponent beyond 64 bits": lambda: Variant(score=lambda s, *_: s ** (10**400)),
    "grid": lambda: fg.neighborhood(None, 3),
    "window of a grid": lambda: fg.neighborhood((4, 4), None),
    "empty grid": lambda: fg.neighborhood((), ()),
    "jit": lambda: Variant(score=torch.jit.trace(lambda s, b, h, q, k: s + b, (torch.ones(()),) * 5)),
    "target": lambda: fg.compile(Variant(), target=[]),
    "plan": lambda: fg.compile(Variant(), plan=[("block_q", 64)]),
    "input names": lambda: fg.compile(Variant())(_T, _T, _T, inputs={1: _T, "a": _T}),
    "numpy": lambda: fg.compile(Variant())(*(np.zeros((1, 1, 4, 8)),) * 3),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_flashgen_s_own(name):
    with pytest.raises(fg.FlashgenError):
        ERRORS[name]()


@pytest.mark.parametrize("wrong", [([1], _T, _T), (_T, [1], _T), (_T.numpy(), _T, _T), (_T.to("meta"), _T, _T)], ids=["list", "second", "numpy", "meta"])
def test_errors_under_autocast(wrong):
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(fg.FlashgenError):
        fg.compile(Variant())(*wrong)


def test_formatting_a_traced_value():
    seen = []
    Variant(score=lambda s, b, h, q, k: (seen.append(f"{s:.2f} {q:3d}"), s)[1])
    assert seen == ["Expr(s: real) Expr(q: int)"]


@pytest.mark.parametrize("compiler", ["g++ 'x", "/bin/true", "/nonexistent", "''"])
def test_compilers_that_are_none(compiler, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE", "off")
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(fg.CompileError, match="CXX"):
        fg.compile(Variant(), target="cpu").build()


def test_a_compiler_named_by_a_relative_path(monkeypatch, tmp_path):
    (tmp_path / "mine").symlink_to(shutil.which("g++") or shutil.which("clang++"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "./mine")
    assert host_compiler() == (str(tmp_path / "mine"),)


def test_folders_that_are_none(monkeypatch):
    q, k, v = qkv()
    monkeypatch.setenv("FLASHGEN_DUMP", "/dev/null/x")
    with pytest.raises(fg.FlashgenError, match="FLASHGEN_DUMP"):
        fg.compile(Variant()).build(q, k, v)
    monkeypatch.delenv("FLASHGEN_DUMP")
    monkeypatch.setenv("FLASHGEN_CACHE", "~nobody_of_this_name/x")
    with pytest.raises(fg.FlashgenError, match="FLASHGEN_CACHE"):
        fg.compile(Variant()).build(q, k, v)
