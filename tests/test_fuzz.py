"""Do random compositions of the catalogue, shapes and options agree with the eager reference, forward and backward?"""

from __future__ import annotations

import random

import pytest
import torch

import flashgen as fg
from flashgen.reference import reference


def random_call(seed):
    """A variant and a call: masks, scores, sinks, lengths, grouped heads, strides and poisoned keys, all drawn from the seed."""
    rnd = random.Random(seed)
    torch.manual_seed(seed)
    batch, kv_heads, group = rnd.choice([1, 2]), rnd.choice([1, 2]), rnd.choice([1, 1, 3])
    heads, q_len, kv_len = kv_heads * group, rnd.choice([1, 3, 17, 50, 70, 131]), rnd.choice([1, 5, 33, 64, 100, 200])
    dim_qk, dim_v = rnd.choice([(8, 8), (16, 16), (5, 12), (24, 40)])
    real = lambda *s: torch.randn(*s, dtype=torch.float64)  # noqa: E731
    ids = (torch.arange(max(q_len, kv_len)) // rnd.choice([7, 31])).to(torch.int32)
    masks = [
        lambda: fg.causal,
        lambda: fg.causal_top_left,
        lambda: fg.sliding_window(rnd.choice([-1, 0, 5, 40]), rnd.choice([-1, 0, 9])),
        lambda: fg.prefix_lm(rnd.choice([0, 7, 90])),
        lambda: fg.prefix_lm(torch.randint(0, kv_len + 1, (batch,), dtype=torch.int32)),
        lambda: fg.chunked(rnd.choice([4, 13, 32])),
        lambda: fg.dilated(rnd.choice([2, 3])),
        lambda: fg.document(ids),
        lambda: fg.padding(torch.randint(0, kv_len + 1, (batch,))),
        lambda: fg.global_tokens(torch.rand(max(q_len, kv_len)) < 0.1),
        lambda: fg.from_dense(torch.rand(batch, 1, q_len, kv_len) < 0.7),
        lambda: fg.block_sparse(torch.rand(heads, -(-q_len // 16), -(-kv_len // 16)) < 0.5, 16),
        lambda: fg.mask(lambda b, h, q, k: (q + k) % 3 != h % 3),
    ]
    table, every = real(heads, 2 * 9 + 1).requires_grad_(), real(1, heads, q_len, kv_len).requires_grad_()
    scores = [
        lambda: fg.softcap(rnd.choice([1.5, 20.0])),
        lambda: fg.alibi(),
        lambda: fg.alibi(torch.rand(batch, heads, dtype=torch.float64)),
        lambda: fg.relative_bias(table),
        lambda: fg.bias(every),
        lambda: fg.t5_bias(real(32, heads)),
        lambda: fg.score(lambda s, b, h, q, k: s * torch.sigmoid(s) - 0.1 * (q - k).abs() * s),
    ]
    mask = rnd.choice(masks)() if rnd.random() < 0.8 else None
    if mask is not None and rnd.random() < 0.5:
        other = rnd.choice(masks)()
        mask = rnd.choice([mask & other, mask | other, mask & ~other])
    score = rnd.choice(scores)() if rnd.random() < 0.6 else None
    if score is not None and rnd.random() < 0.3:
        score = score >> rnd.choice(scores)()
    sink = real(heads).requires_grad_() if rnd.random() < 0.3 else None
    variant = fg.Variant(mask=mask, score=score, scale=rnd.choice([None, None, 0.3, -0.5, 0.0]), sink=sink is not None)
    shapes = [(batch, heads, q_len, dim_qk), (batch, kv_heads, kv_len, dim_qk), (batch, kv_heads, kv_len, dim_v)]
    q, k, v = (real(*s) for s in shapes)
    if rnd.random() < 0.4:  # heads inside, as (B, L, H, D) projections give them
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    call = {"sink": sink} if sink is not None else {}
    if rnd.random() < 0.25:
        call["seqlens_k"] = torch.randint(0, kv_len + 1, (batch,), dtype=torch.int32)
    leaves = [t.requires_grad_() for t in (q, k, v)] + [t for t in (table, every, sink) if t is not None]
    return variant, (q, k, v), call, leaves


@pytest.mark.parametrize("seed", range(24))
def test_agrees_with_the_reference(seed):
    variant, tensors, call, leaves = random_call(seed)
    out, aux = fg.compile(variant)(*tensors, return_aux=True, **call)
    want_out, want_lse, want_top = reference(variant, *tensors, **call)
    for got, want in ((out, want_out), (aux.lse, want_lse), (aux.max_scores, want_top)):
        torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)
    dout, dlse = torch.randn_like(out), torch.randn_like(aux.lse)
    finite = torch.isfinite(want_lse)
    total = lambda o, s: (o * dout).sum() + torch.where(finite, s * dlse, torch.zeros_like(s)).sum()  # noqa: E731
    got = torch.autograd.grad(total(out, aux.lse), leaves, allow_unused=True)
    want = torch.autograd.grad(total(want_out, want_lse), leaves, allow_unused=True)
    for g, w in zip(got, want):
        if w is not None or g is not None:
            w = torch.zeros_like(g) if w is None else w
            torch.testing.assert_close(torch.zeros_like(w) if g is None else g, w, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bad_key_reaches_only_the_rows_that_see_it(dtype, bad):
    """Keys from 40 on hold NaN or Inf: rows before 40 of a causal call know nothing of it, forward or backward."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 96, 32).to(dtype) for _ in range(3))
    k[:, :, 40:], v[:, :, 40:] = bad, bad
    kernel = fg.compile(fg.Variant(mask=fg.causal))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = kernel(*leaves)
    clean = [t[:, :, :40].clone().requires_grad_() for t in (q, k, v)]
    want = kernel(*clean)
    torch.testing.assert_close(out[:, :, :40], want, atol=1e-5, rtol=1e-2)
    assert not torch.isfinite(out[:, :, 40:]).any()
    dout = torch.zeros_like(out)
    dout[:, :, :40] = torch.randn(1, 2, 40, 32).to(dtype)
    (dq,), (clean_dq,) = torch.autograd.grad(out, leaves[:1], dout), torch.autograd.grad(want, clean[:1], dout[:, :, :40])
    torch.testing.assert_close(dq[:, :, :40], clean_dq, atol=1e-4, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bad_key_that_nobody_sees_leaves_every_gradient_alone(dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 96, 32).to(dtype) for _ in range(3))
    k[:, :, 40:44], v[:, :, 40:44] = float("nan"), float("inf")
    leaves, dout = [t.clone().requires_grad_() for t in (q, k, v)], torch.randn(1, 2, 96, 32).to(dtype)
    kernel = fg.compile(fg.Variant(mask=fg.causal & fg.mask(lambda b, h, q, k: (k < 40) | (k >= 44))))
    got = torch.autograd.grad(kernel(*leaves), leaves, dout)
    k[:, :, 40:44], v[:, :, 40:44] = 0, 0
    clean = [t.clone().requires_grad_() for t in (q, k, v)]
    for g, w in zip(got, torch.autograd.grad(kernel(*clean), clean, dout)):
        torch.testing.assert_close(g, w, atol=1e-5, rtol=1e-2)


def test_an_infinite_value_stays_in_its_column():
    q, k, v = (torch.randn(1, 1, 8, 8) for _ in range(3))
    v[0, 0, 5, 3] = float("inf")
    out = fg.compile(fg.Variant(mask=fg.causal))(q, k, v)[0, 0]
    assert torch.isposinf(out[5:, 3]).all() and torch.isfinite(out[:5]).all()
    out[5:, 3] = 0
    assert torch.isfinite(out).all()
