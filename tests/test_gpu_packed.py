"""Is each packed sequence on the GPU computed as if it were alone, also with dropout, in a graph that is replayed with other offsets, and repeatably?"""

from __future__ import annotations

import math

import pytest
import torch

import flashgen as fg
from flashgen.reference import reference

pytestmark = pytest.mark.gpu
# Of each sequence; the last ones fit one block of keys.
ROWS, KEYS = [700, 0, 33, 129, 128, 1, 5, 100, 128, 90, 20, 129], [700, 70, 200, 129, 300, 0, 5, 120, 128, 20, 100, 30]
SPARE = 11  # rows of no sequence
PADDED = torch.tensor([300, 1, 200, 35, 100, 3, 0, 70, 128, 0, 100, 9], dtype=torch.int32)
VARIANTS = {
    "plain": (fg.Variant(), 128),
    "causal": (fg.Variant(mask=fg.causal), 64),
    "causal, 256": (fg.Variant(mask=fg.causal), 256),
    "soft-cap and window": (fg.Variant(mask=fg.causal & fg.sliding_window(150, 0), score=fg.softcap(5.0)), 128),
    "padding and ALiBi": (fg.Variant(mask=fg.padding(PADDED.cuda() if torch.cuda.is_available() else PADDED), score=fg.alibi()), 128),
    "chunks": (fg.Variant(mask=lambda b, h, q, k: (q // 64 == k // 64) | (k < 4), score=lambda s, b, h, q, k: s - 0.01 * (q - k).abs()), 64),
}


def offsets(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32).cuda()


def packed(dim, dtype=torch.bfloat16):
    """q, k, v with NaN in the rows of no sequence, dO, and the arguments of the call."""
    generator = torch.Generator("cuda").manual_seed(3)
    sizes = ((ROWS, 4), (KEYS, 2), (KEYS, 2), (ROWS, 4))
    tensors = [torch.randn(sum(n) + SPARE, heads, dim, generator=generator, device="cuda").to(dtype) for n, heads in sizes]
    for t, (n, _) in zip(tensors, sizes):
        t[sum(n) :] = math.nan
    call = {"cu_seqlens_q": offsets(ROWS), "cu_seqlens_k": offsets(KEYS), "max_seqlen_q": max(ROWS), "max_seqlen_k": max(KEYS)}
    return [t.requires_grad_() for t in tensors[:3]], tensors[3], call


def differentiated(kernel, leaves, dout, call):
    out, aux = kernel.varlen(*leaves, return_aux=("lse",), **call)
    return out.detach(), aux.lse.detach(), *torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("family", [None, "sm80"])
@pytest.mark.parametrize("name", VARIANTS)
def test_each_sequence_is_as_if_alone(name, family, dropout_p):
    variant, dim = VARIANTS[name]
    (q, k, v), dout, call = packed(dim)
    random = {"dropout_p": dropout_p, "seed": 77} if dropout_p else {}
    out, lse, *gradients = differentiated(fg.compile(variant, family=family), [q, k, v], dout, {**call, **random})
    first_q, first_k = call["cu_seqlens_q"].tolist(), call["cu_seqlens_k"].tolist()
    for n in range(len(ROWS)):
        rows, keys = slice(first_q[n], first_q[n + 1]), slice(first_k[n], first_k[n + 1])
        alone = [t[at].detach().transpose(0, 1)[None].double().requires_grad_() for t, at in ((q, rows), (k, keys), (v, keys))]
        items = [t.expand(n + 1, -1, -1, -1) for t in alone]  # of which the last is number n
        wanted, wanted_lse, _ = (t[-1] for t in reference(variant, *items, **random))
        found = torch.autograd.grad((wanted * dout[rows].transpose(0, 1).double()).sum(), alone, allow_unused=True)
        seen = wanted_lse > -math.inf
        assert (lse[:, rows][~seen] == -math.inf).all() and torch.allclose(lse[:, rows][seen].double(), wanted_lse[seen], atol=1e-3), n
        for at, got, expected in zip((rows, rows, keys, keys), (out, *gradients), (wanted.detach()[None], *found)):
            expected = torch.zeros_like(got[at], dtype=torch.double) if expected is None else expected[0].transpose(0, 1)
            assert (got[at].double() - expected).norm() <= 2**-7 * (expected.norm() + 1), n
    assert (lse[:, first_q[-1] :] == -math.inf).all()
    assert all((t[n:] == 0).all() for t, n in zip((out, *gradients), (first_q[-1], first_q[-1], first_k[-1], first_k[-1])))


def test_a_deterministic_backward_repeats_its_bits():
    leaves, dout, call = packed(128)
    kernel = fg.compile(fg.Variant(mask=fg.causal), deterministic=True)
    first = differentiated(kernel, leaves, dout, call)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, differentiated(kernel, leaves, dout, call)))


def test_a_graph_takes_other_offsets():
    kernel = fg.compile(fg.Variant(mask=fg.causal))
    (q, k, v), _, call = packed(64)
    q, k, v = (t.detach().nan_to_num() for t in (q, k, v))
    kernel.varlen(q, k, v, **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.varlen(q, k, v, **call)
    for order in ([3, 1, 6, 0, 2, 5, 4, *range(7, len(ROWS))], range(len(ROWS) - 1, -1, -1)):
        for name, lengths in (("cu_seqlens_q", ROWS), ("cu_seqlens_k", KEYS)):
            call[name].copy_(offsets([lengths[i] for i in order]))
        graph.replay()
        assert torch.equal(out, kernel.varlen(q, k, v, **call))


def test_offsets_that_make_no_sense_touch_nothing_outside():
    kernel = fg.compile(fg.Variant(mask=fg.causal))
    (q, k, v), dout, call = packed(128)
    wrong = torch.tensor([0, 500, 100, 2**30, -5, 900, 7, 400], dtype=torch.int32, device="cuda")
    differentiated(kernel, [q, k, v], dout, {**call, "cu_seqlens_q": wrong, "cu_seqlens_k": wrong.flip(0).contiguous()})
    torch.cuda.synchronize()
