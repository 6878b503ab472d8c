"""Does a kernel behave as a torch operation: operators, autograd, compile, autocast, checkpoint, copies?"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import flashgen as fg
from flashgen import ops
from flashgen.reference import reference


def qkv(batch=2, heads=4, kv_heads=4, q_len=33, kv_len=33, dim=16, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = [(batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, dim)]
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes]


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_gradcheck_softcap():
    kernel = fg.compile(fg.Variant(mask=fg.causal, score=fg.softcap(2.0)))
    assert torch.autograd.gradcheck(kernel, (double(1, 2, 7, 5), double(1, 1, 9, 5), double(1, 1, 9, 3)))


def test_gradcheck_alibi():
    kernel = fg.compile(fg.Variant(score=fg.alibi()))
    assert torch.autograd.gradcheck(kernel, (double(1, 3, 6, 4), double(1, 3, 8, 4), double(1, 3, 8, 4)))


def test_gradcheck_learned_table():
    table = double(2, 7)
    kernel = fg.compile(fg.Variant(score=fg.relative_bias(table)))
    assert torch.autograd.gradcheck(lambda q, k, v, t: kernel(q, k, v), (double(1, 2, 7, 5), double(1, 2, 9, 5), double(1, 2, 9, 5), table))


def test_gradcheck_input_table():
    kernel = fg.compile(fg.Variant(score=fg.relative_bias(fg.input("table", ndim=1))))
    assert torch.autograd.gradcheck(
        lambda q, k, v, t: kernel(q, k, v, inputs={"table": t}), (double(1, 2, 5, 4), double(1, 2, 6, 4), double(1, 2, 6, 4), double(5))
    )


def test_gradcheck_sink_and_lse():
    kernel = fg.compile(fg.Variant(mask=fg.causal & fg.mask(lambda b, h, q, k: q != 3), sink=True))

    def both(q, k, v, sink):
        out, aux = kernel(q, k, v, sink=sink, return_aux=("lse",))
        return out, aux.lse

    assert torch.autograd.gradcheck(both, (double(1, 2, 7, 5), double(1, 1, 9, 5), double(1, 1, 9, 5), double(2)))


def test_opcheck():
    kernel = fg.compile(fg.Variant(mask=fg.causal, score=fg.softcap(3.0)))
    call, traced = kernel._dense(*qkv(), None, None, None, 0.0, None, layout="bhld")
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in call]
    text = kernel._handle(traced.form.text, "dense", True, False)
    assert set(opcheck(torch.ops.flashgen.forward.default, (text, *plain)).values()) == {"SUCCESS"}
    out, lse, _, low = ops.run_forward(text, ops.Call(*plain))
    backward = (text, *plain, torch.randn_like(out), torch.randn_like(lse), out, low, lse, [True, False, True], [], False)
    assert set(opcheck(torch.ops.flashgen.backward.default, backward).values()) == {"SUCCESS"}


def test_a_second_derivative_is_a_clear_error():
    q, k, v = qkv()
    (grad,) = torch.autograd.grad(fg.compile(fg.Variant())(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(fg.VariantError, match="second derivative"):
        (grad.square().sum() + q.sum()).backward()


def test_compile_fullgraph_forward_and_backward():
    table = torch.randn(4, 4, requires_grad=True)
    kernel = fg.compile(fg.Variant(mask=fg.causal, score=lambda s, b, h, q, k: s + table[h, (q - k) % 4] * 0.5))
    q, k, v = qkv()
    compiled = torch.compile(lambda q, k, v: kernel(q * 1.0, k, v) * 2, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(q, k, v).square().sum(), (q, k, v, table))
    want = torch.autograd.grad((kernel(q * 1.0, k, v) * 2).square().sum(), (q, k, v, table))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)


def test_compile_with_aux_sink_and_varlen():
    kernel = fg.compile(fg.Variant(mask=fg.causal, sink=True))
    q, k, v = (t.detach()[0].transpose(0, 1).contiguous() for t in qkv())
    sink, cu = torch.randn(4), torch.tensor([0, 20, 33], dtype=torch.int32)
    call = lambda: kernel.varlen(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=20, max_seqlen_k=20, sink=sink, return_aux=True)  # noqa: E731
    out, aux = call()
    dense = reference(fg.Variant(mask=fg.causal, sink=True), *(t[None, :20].transpose(1, 2) for t in (q, k, v)), sink=sink)
    torch.testing.assert_close(out[:20], dense[0][0].transpose(0, 1), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(aux.lse[:, :20], dense[1][0], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(aux.max_scores[:, :20], dense[2][0], atol=2e-6, rtol=1e-5)


def test_compile_takes_one_tensor_twice():
    q, k, _ = qkv()
    kernel = fg.compile(fg.Variant(mask=fg.causal))
    packed = [t.detach()[0].transpose(0, 1).contiguous().requires_grad_() for t in (q, k)]
    cu = torch.tensor([0, 20, 33], dtype=torch.int32)
    calls = {
        "k is v": (lambda: kernel(q, k, k), (q, k)),
        "q is k is v": (lambda: kernel(q, q, q), (q,)),
        "flex_attention": (lambda: fg.flex_attention(q, k, k), (q, k)),
        "cu_seqlens": (lambda: kernel.varlen(packed[0], packed[1], packed[1], cu_seqlens_q=cu, cu_seqlens_k=cu), packed),
    }
    for name, (call, leaves) in calls.items():
        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        got, want = (torch.autograd.grad(f().square().sum(), leaves) for f in (compiled, call))
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


def test_autocast_runs_in_its_dtype_and_gradients_keep_theirs():
    q, k, v = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fg.compile(fg.Variant(mask=fg.causal))(q, k, v)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32


def test_checkpoint_gives_the_same_gradients():
    q, k, v = qkv()
    kernel = fg.compile(fg.Variant(mask=fg.causal, score=fg.alibi()))
    (plain,) = torch.autograd.grad(kernel(q, k, v).square().sum(), q)
    (again,) = torch.autograd.grad(checkpoint(kernel, q, k, v, use_reentrant=False).square().sum(), q)
    assert torch.equal(plain, again)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(4, 9))
        self.kernel = fg.compile(fg.Variant(score=fg.relative_bias(self.table), mask=fg.mask(lambda b, h, q, k: k <= q + 3)))

    def forward(self, q, k, v):
        return self.kernel(q, k, v)


def test_deepcopy_of_a_module_follows_its_own_parameter():
    layer, (q, k, v) = Layer(), qkv()
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.table.zero_()
    assert not torch.equal(layer(q, k, v), other(q, k, v))
    other(q, k, v).sum().backward()
    assert other.table.grad is not None and layer.table.grad is None


def test_pickle_of_a_module_keeps_results():
    layer, (q, k, v) = Layer(), qkv()
    assert torch.equal(pickle.loads(pickle.dumps(layer))(q, k, v), layer(q, k, v))


def test_a_captured_tensor_is_read_at_each_call():
    table, (q, k, v) = torch.zeros(9), qkv()
    scaled = fg.compile(fg.Variant(score=lambda s, b, h, q, k: s + (table * 2)[(q - k).clamp(-4, 4) + 4]))
    before = scaled(q, k, v)
    table.copy_(torch.randn(9))
    want, _, _ = reference(fg.Variant(score=lambda s, b, h, q, k: s + 2 * table[(q - k).clamp(-4, 4) + 4]), q, k, v)
    assert not torch.equal(before, scaled(q, k, v))
    torch.testing.assert_close(scaled(q, k, v), want, atol=2e-6, rtol=1e-5)


def test_only_wanted_gradients_are_computed():
    q, k, v = qkv()
    k.requires_grad_(False)
    out = fg.compile(fg.Variant(mask=fg.causal))(q, k, v)
    out.sum().backward()
    assert q.grad is not None and v.grad is not None and k.grad is None


def test_inference_mode():
    q, k, v = (t.detach() for t in qkv())
    with torch.inference_mode():
        out = fg.compile(fg.Variant())(q, k, v)
    assert not out.requires_grad


def test_kv_batch_of_one_is_shared_and_its_gradient_summed():
    q, k, v = qkv()
    one = [t[:1].detach().requires_grad_() for t in (k, v)]
    kernel = fg.compile(fg.Variant(mask=fg.causal))
    got = torch.autograd.grad(kernel(q, *one).square().sum(), one)
    want = torch.autograd.grad(reference(kernel.variant, q, *one)[0].square().sum(), one)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
