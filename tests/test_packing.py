"""Is a decoding step of grouped heads, packed into rows of their kv head, the same attention?"""

from __future__ import annotations

import pytest
import torch

import flashgen as fg
from flashgen import calls, reference
from flashgen.packing import pack_group

BATCH, HEADS, KV_HEADS, LENGTH, DIM = 2, 6, 2, 90, 16
GATE = torch.linspace(-1, 1, HEADS)
VARIANTS = {
    "plain": lambda: fg.Variant(),
    "causal": lambda: fg.Variant(mask=fg.causal),
    "top_left": lambda: fg.Variant(mask=fg.causal_top_left),
    "window": lambda: fg.Variant(mask=fg.sliding_window(left=20, right=0), score=fg.softcap(3.0)),
    "alibi": lambda: fg.Variant(score=fg.alibi()),
    "by_head": lambda: fg.Variant(mask=lambda b, h, q, k: (k + h) % 3 != b, score=lambda s, b, h, q, k: s * GATE[h]),
}


def tensors(layout: str, length: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(BATCH, n, h, DIM, generator=generator).transpose(1, 2) for n, h in ((length, HEADS), (LENGTH, KV_HEADS), (LENGTH, KV_HEADS)))
    return [t if layout == "blhd" else t.contiguous() for t in (q, k, v)]


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_decoding_step_agrees_with_the_reference(name, layout):
    variant, (q, k, v) = VARIANTS[name](), tensors(layout)
    kernel = fg.compile(variant)
    expected = reference.reference(variant, q.double(), k.double(), v.double())
    for _ in range(2):  # the second call takes the short way
        out, aux = kernel(q, k, v, return_aux=True)
        torch.testing.assert_close(out, expected[0].float())
        torch.testing.assert_close(aux.lse, expected[1].float())
        torch.testing.assert_close(aux.max_scores, expected[2].float())
        assert torch.equal(kernel(q, k, v), out)


def test_its_gradients_agree():
    variant = VARIANTS["by_head"]()
    kernel, leaves = fg.compile(variant), [t.requires_grad_() for t in tensors("bhld")]
    grad_out = torch.randn(BATCH, HEADS, 1, DIM)
    mine = torch.autograd.grad(kernel(*leaves), leaves, grad_out)
    expected = torch.autograd.grad(reference.reference(variant, *(t.double() for t in leaves))[0], leaves, grad_out.double())
    for a, b in zip(mine, expected):
        torch.testing.assert_close(a, b.to(a.dtype), atol=1e-5, rtol=1e-4)


def test_used_lengths_move_the_diagonal_of_each_item():
    variant, (q, k, v) = VARIANTS["window"](), tensors("bhld")
    used = torch.tensor([LENGTH - 30, LENGTH], dtype=torch.int32)
    out = fg.compile(variant)(q, k, v, seqlens_k=used)
    for b, n in enumerate(used.tolist()):
        torch.testing.assert_close(out[b : b + 1], reference.reference(variant, q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n])[0])


def test_only_single_rows_of_grouped_heads_are_packed():
    form = VARIANTS["causal"]().trace({}).form
    for length, heads, packed in ((1, KV_HEADS, True), (2, KV_HEADS, False), (1, HEADS, False)):
        q, k, v = torch.zeros(1, HEADS, length, DIM), *torch.zeros(2, 1, heads, LENGTH, DIM)
        call = calls.Call(q, k, v, None, None, None, None, [], [], [], 1.0, length, LENGTH)
        new_form, new_call, rows = calls.packed_heads(form, call)
        assert (new_form != form) == packed and (new_call.q.shape == (1, KV_HEADS, HEADS // KV_HEADS, DIM)) == packed
        assert rows(q).data_ptr() == q.data_ptr()


def test_a_kernel_describes_the_packed_form():
    q, k, v = tensors("bhld")
    assert "q_len >> " in fg.compile(fg.Variant(mask=fg.causal)).source(q[:, :4], k, v)
    assert pack_group(VARIANTS["plain"]().trace({}).form, 4) == VARIANTS["plain"]().trace({}).form
