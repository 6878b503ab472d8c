"""Is dropout the rule it claims to be: a function of seed and position alone, the same for every plan and device, forward and backward?

Philox is written here once more, in numpy, and checked against its authors' known answers.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import flashgen as fg
from flashgen import ops, runs
from flashgen.reference import reference

SEED = 0x9234567890ABCDEF  # both halves differ, the highest bit is set
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def philox(counter, key):
    """Philox4x32-10 (Salmon et al. 2011) on arrays of 32-bit words."""
    c = [np.asarray(x, np.uint64) for x in counter]
    low, high = key
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        word = lambda x: x & np.uint64(0xFFFFFFFF)  # noqa: E731
        c = [(b >> np.uint64(32)) ^ c[1] ^ np.uint64(low), word(b), (a >> np.uint64(32)) ^ c[3] ^ np.uint64(high), word(a)]
        low, high = (low + 0x9E3779B9) % 2**32, (high + 0xBB67AE85) % 2**32
    return c


def kept(p, seed, batch, heads, q_len, kv_len):
    """bool (B, Hq, Lq, Lk) by the rule of the documentation."""
    head = np.arange(batch * heads).reshape(batch, heads, 1, 1)
    words = philox((np.arange(-(-kv_len // 4)), np.arange(q_len).reshape(-1, 1), head, np.zeros(1)), (seed % 2**32, seed >> 32))
    shape = (batch, heads, q_len, -(-kv_len // 4))
    drawn = np.stack([np.broadcast_to(w, shape) for w in words], -1).reshape(batch, heads, q_len, -1)
    return torch.from_numpy(drawn[..., :kv_len] >= math.ceil(p * 2.0**32))


def test_philox_gives_its_authors_answers():
    answers = {
        ((0, 0, 0, 0), (0, 0)): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)): (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    }
    for (counter, key), words in answers.items():
        assert tuple(int(w) for w in philox(counter, key)) == words


def attended(q, k, v, keep, p, *, visible=None, cap=None, sink=None):
    """Plain torch: out and lse with the kept entries of P scaled by 1 / (1 - p)."""
    heads, dim = q.shape[1], q.shape[-1]
    k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    s = (q @ k.transpose(-1, -2)) * dim**-0.5
    s = s if cap is None else cap * torch.tanh(s / cap)
    s = s if visible is None else s.masked_fill(~visible, -math.inf)
    logits = s if sink is None else torch.cat([s, sink.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    lse = logits.logsumexp(-1)
    weights = torch.exp(s - lse[..., None]) * keep / (1 - p)
    return weights @ v, lse


def tensors(batch, heads, kv_heads, q_len, kv_len, dim, dtype, device="cpu"):
    torch.manual_seed(0)
    shapes = [(batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, dim)]
    return [torch.randn(s, dtype=dtype).to(device).requires_grad_() for s in shapes]


def exposed(kernel, batch, heads, q_len, kv_len, p, seed, dtype=torch.float32, device="cpu", **options):
    """bool (B, Hq, Lq, Lk): the entries that a kernel keeps, seen through equal weights and one-hot values, 32 keys at a time."""
    q = torch.zeros(batch, heads, q_len, 32, dtype=dtype, device=device)
    k, found = torch.zeros(batch, heads, kv_len, 32, dtype=dtype, device=device), []
    for first in range(0, kv_len, 32):
        v = torch.zeros(batch, heads, kv_len, 32, dtype=dtype, device=device)
        width = min(32, kv_len - first)
        v[:, :, first : first + width, :width] = torch.eye(width, dtype=dtype, device=device)
        found.append(kernel(q, k, v, dropout_p=p, seed=seed, **options)[..., :width] != 0)
    return torch.cat(found, -1).cpu()


# ---- the bits


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", [(70, 203), (3, 90), (150, 21)], ids=str)
def test_the_bits_are_those_of_the_rule(lengths, dtype, device):
    expected = kept(0.3, SEED, 2, 3, *lengths)
    assert torch.equal(exposed(fg.compile(fg.Variant()), 2, 3, *lengths, 0.3, SEED, dtype, device), expected)


@pytest.mark.parametrize("plan", [{"block_q": 16, "block_kv": 8}, {"block_q": 32, "block_kv": 96}, {"block_q": 64, "block_kv": 128}], ids=str)
def test_every_plan_draws_the_same_bits(plan):
    kernel = fg.compile(fg.Variant(), plan={"amx": 0, **plan})
    assert torch.equal(exposed(kernel, 1, 2, 75, 130, 0.5, 7), kept(0.5, 7, 1, 2, 75, 130))


@pytest.mark.parametrize("device", DEVICES)
def test_tiles_that_begin_within_four_keys(device):
    """A window makes the CPU's tiles begin at any key."""
    mask = fg.sliding_window(13, 9)
    keep = exposed(fg.compile(fg.Variant(mask=mask)), 1, 2, 150, 150, 0.4, SEED, device=device)
    place = torch.arange(150)
    visible = (place >= place[:, None] - 13) & (place <= place[:, None] + 9)
    assert torch.equal(keep, kept(0.4, SEED, 1, 2, 150, 150) & visible)


def test_float64_draws_the_same_bits():
    assert torch.equal(exposed(fg.compile(fg.Variant()), 1, 2, 40, 70, 0.25, 5, torch.float64), kept(0.25, 5, 1, 2, 40, 70))


# ---- values and gradients


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 5e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=str)
def test_values_and_gradients(dtype, tolerance, deterministic, device):
    if dtype == torch.float64 and device == "cuda":
        pytest.skip("the GPU kernels take no float64")
    q_len, kv_len, p = 133, 150, 0.3
    variant = fg.Variant(mask=fg.causal & fg.sliding_window(60, 0), score=fg.softcap(4.0), sink=True)
    q, k, v = tensors(2, 4, 2, q_len, kv_len, 40, dtype, device)
    sink = torch.randn(4, dtype=torch.promote_types(dtype, torch.float32), device=device, requires_grad=True)
    out, aux = fg.compile(variant, deterministic=deterministic)(q, k, v, sink=sink, dropout_p=p, seed=SEED, return_aux=("lse",))
    exact = [t.detach().cpu().double().requires_grad_() for t in (q, k, v, sink)]
    row, key = torch.arange(q_len)[:, None] + kv_len - q_len, torch.arange(kv_len)
    visible = (key <= row) & (key >= row - 60)
    want = attended(*exact[:3], kept(p, SEED, 2, 4, q_len, kv_len), p, visible=visible, cap=4.0, sink=exact[3])
    dout, dlse = torch.randn(out.shape, dtype=torch.float64), torch.randn(aux.lse.shape, dtype=torch.float64)
    got = [out, aux.lse, *torch.autograd.grad([out, aux.lse], [q, k, v, sink], [dout.to(out), dlse.to(aux.lse)])]
    expected = [*want, *torch.autograd.grad(list(want), exact, [dout, dlse])]
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv", "dsink"), got, expected):
        assert float((x.detach().cpu().double() - y.detach()).abs().max() / y.detach().abs().max()) < tolerance, name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("q_len", [1, 3])
def test_few_rows_and_splits_over_keys(q_len, splits, device):
    """Grouped heads of a decoding step are rows of a kv head elsewhere: dropout counts query heads."""
    q, k, v = (t.detach() for t in tensors(2, 6, 2, q_len, 300, 32, torch.float32, device))
    out = fg.compile(fg.Variant(), plan=splits and {"kv_splits": splits})(q, k, v, dropout_p=0.4, seed=SEED)
    want, _ = attended(*(t.cpu().double() for t in (q, k, v)), kept(0.4, SEED, 2, 6, q_len, 300), 0.4)
    torch.testing.assert_close(out.cpu().double(), want, rtol=0, atol=2e-6)


def test_gradcheck():
    table = torch.randn(7, dtype=torch.float64, requires_grad=True)
    kernel = fg.compile(fg.Variant(mask=fg.causal, score=fg.relative_bias(table)))
    q, k, v = (torch.randn(1, h, n, 5, dtype=torch.float64, requires_grad=True) for h, n in ((2, 7), (1, 9), (1, 9)))
    assert torch.autograd.gradcheck(lambda q, k, v, _: kernel(q, k, v, dropout_p=0.4, seed=3), (q, k, v, table))


@pytest.mark.parametrize("device", DEVICES)
def test_packed_sequences_count_for_themselves(device):
    lengths, p = [0, 70, 5, 33], 0.35
    starts = [0, 0, 70, 75, 108]
    cu = torch.tensor(starts, dtype=torch.int32, device=device)
    torch.manual_seed(0)
    q, k, v = (torch.randn(108, h, 16, device=device, requires_grad=True) for h in (4, 2, 2))
    out = fg.compile(fg.Variant(mask=fg.causal)).varlen(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, dropout_p=p, seed=SEED)
    dout = torch.randn_like(out)
    got = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    keep = kept(p, SEED, 4, 4, 70, 70)
    exact = [t.detach().cpu().double().requires_grad_() for t in (q, k, v)]
    parts = []
    for b, (first, n) in enumerate(zip(starts, lengths)):
        part = [t[first : first + n].transpose(0, 1)[None] for t in exact]
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        parts.append(attended(*part, keep[b : b + 1, :, :n, :n], p, visible=mask)[0][0].transpose(0, 1))
    want = torch.cat(parts)
    for x, y in zip(got, [want, *torch.autograd.grad(want, exact, dout.cpu().double())]):
        torch.testing.assert_close(x.detach().cpu().double(), y.detach(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_statistics_are_those_without_dropout(dtype, device):
    kernel = fg.compile(fg.Variant(mask=fg.causal))
    q, k, v = tensors(1, 2, 2, 90, 90, 32, dtype, device)
    _, plain = kernel(q, k, v, return_aux=True)
    _, dropped = kernel(q, k, v, return_aux=True, dropout_p=0.5, seed=1)
    torch.testing.assert_close(plain.lse, dropped.lse, rtol=0, atol=1e-6)
    assert torch.equal(plain.max_scores, dropped.max_scores)


@pytest.mark.parametrize("p", [1, 1.0, 1 - 2.0**-53, 1 - 2.0**-33])
def test_where_p_rounds_to_one_nothing_is_kept(p):
    q, k, v = tensors(1, 2, 2, 20, 20, 16, torch.float32)
    out, aux = fg.compile(fg.Variant())(q, k, v, dropout_p=p, seed=0, return_aux=True)
    assert not out.any() and torch.isfinite(aux.lse).all()
    gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert not any(g.any() for g in gradients)


def test_the_smallest_p_drops_next_to_nothing():
    assert exposed(fg.compile(fg.Variant()), 1, 1, 64, 64, 5e-324, 1).all()


def test_p_zero_draws_nothing():
    q, k, v = tensors(1, 2, 2, 20, 20, 16, torch.float32)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    kernel = fg.compile(fg.Variant())
    assert torch.equal(kernel(q, k, v, dropout_p=0.0), kernel(q, k, v)) and torch.equal(torch.get_rng_state(), state)


def test_another_probability_is_no_other_kernel():
    q, k, v = tensors(1, 2, 2, 20, 20, 16, torch.float32)
    kernel = fg.compile(fg.Variant(score=lambda s, b, h, q, k: s * 1.0625))
    kernel(q, k, v, dropout_p=0.1, seed=1)
    built = len(runs._executables)
    for p in (0.2, 0.3, 0.9):
        kernel(q, k, v, dropout_p=p, seed=1)
    assert len(runs._executables) == built


def test_the_reference_follows_the_rule():
    q, k, v = tensors(2, 4, 2, 21, 30, 8, torch.float64)
    out, lse, _ = reference(fg.Variant(), q, k, v, dropout_p=0.3, seed=SEED)
    want = attended(q, k, v, kept(0.3, SEED, 2, 4, 21, 30), 0.3)
    torch.testing.assert_close(out, want[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, want[1], rtol=0, atol=1e-12)


# ---- seeds


@pytest.mark.parametrize("device", DEVICES)
def test_a_seed_of_none_comes_from_torchs_generator(device):
    kernel = fg.compile(fg.Variant())
    q, k, v = tensors(1, 2, 2, 40, 40, 16, torch.float32, device)
    torch.manual_seed(5)
    first, second = kernel(q, k, v, dropout_p=0.5), kernel(q, k, v, dropout_p=0.5)
    torch.manual_seed(5)
    assert torch.equal(kernel(q, k, v, dropout_p=0.5), first) and not torch.equal(first, second)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", [None, 11])
def test_checkpointing_draws_again_what_it_drew(seed, device):
    kernel = fg.compile(fg.Variant(mask=fg.causal))
    q, k, v = tensors(1, 2, 2, 60, 60, 16, torch.float32, device)
    attend = lambda q, k, v: kernel(q, k, v, dropout_p=0.3, seed=seed)  # noqa: E731
    torch.manual_seed(1)
    plain = attend(q, k, v)
    expected = torch.autograd.grad(plain.square().sum(), (q, k, v))
    torch.manual_seed(1)
    again = checkpoint(attend, q, k, v, use_reentrant=False)
    assert torch.equal(plain, again)
    for x, y in zip(torch.autograd.grad(again.square().sum(), (q, k, v)), expected):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_a_replayed_graph_draws_anew():
    kernel = fg.compile(fg.Variant())
    q, k, v = (t.detach() for t in tensors(1, 2, 2, 64, 64, 32, torch.bfloat16, "cuda"))
    kernel(q, k, v, dropout_p=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel(q, k, v, dropout_p=0.5)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)


def test_operators_pass_opcheck():
    kernel = fg.compile(fg.Variant(mask=fg.causal))
    call, traced = kernel._dense(*tensors(1, 2, 2, 17, 17, 16, torch.float32), None, None, None, 0.2, SEED, layout="bhld")
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in call]
    text = kernel._handle(traced.form.text, "dense", True, False)
    assert set(opcheck(torch.ops.flashgen.forward.default, (text, *plain)).values()) == {"SUCCESS"}
    out, lse, _, low = ops.run_forward(text, ops.Call(*plain))
    backward = (text, *plain, torch.randn_like(out), torch.randn_like(lse), out, low, lse, [True, True, True], [], False)
    assert set(opcheck(torch.ops.flashgen.backward.default, backward).values()) == {"SUCCESS"}


@pytest.mark.parametrize("seed", [7, SEED])
def test_under_compile_a_seed_gives_the_same_bits(seed):
    kernel = fg.compile(fg.Variant(mask=fg.causal))
    q, k, v = tensors(1, 2, 2, 50, 50, 16, torch.float32)

    def attend(q, k, v, p):
        return kernel(q, k, v, dropout_p=p, seed=seed)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for p in (0.25, 0.5, 0.75):
        assert torch.equal(compiled(q, k, v, p), attend(q, k, v, p))
    expected, got = (torch.autograd.grad(f(q, k, v, 0.25).square().sum(), (q, k, v)) for f in (attend, compiled))
    for x, y in zip(got, expected):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_under_compile_seeds_may_be_arguments():
    kernel = fg.compile(fg.Variant())
    q, k, v = tensors(1, 2, 2, 30, 30, 16, torch.float32)
    compiled = torch.compile(lambda seed: kernel(q, k, v, dropout_p=0.3, seed=seed), fullgraph=True, backend="aot_eager")
    for seed in (1, 2, 3, SEED, 2**64 - 1):
        assert torch.equal(compiled(seed), kernel(q, k, v, dropout_p=0.3, seed=seed))


def test_under_compile_forward_and_backward_draw_alike_without_a_seed():
    kernel = fg.compile(fg.Variant())
    q, k, _ = tensors(1, 2, 2, 32, 32, 32, torch.float32)
    v = torch.eye(32).expand(1, 2, 32, 32).clone().requires_grad_()
    compiled = torch.compile(lambda q, k, v: kernel(q, k, v, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    first, second = compiled(q, k, v), compiled(q, k, v)
    assert not torch.equal(first, second)
    (dv,) = torch.autograd.grad(first, v, torch.ones_like(first))
    torch.testing.assert_close(dv[..., 0], first.detach().sum(2), rtol=1e-4, atol=1e-5)


def test_deepcopy_and_no_grad_change_nothing():
    kernel = fg.compile(fg.Variant())
    q, k, v = tensors(1, 2, 2, 20, 20, 16, torch.float32)
    with torch.inference_mode():
        plain = kernel(q, k, v, dropout_p=0.5, seed=2)
    assert torch.equal(plain, kernel(q, k, v, dropout_p=0.5, seed=2).detach())


@pytest.mark.parametrize("arguments", [{"dropout_p": -0.1}, {"dropout_p": math.nan}, {"dropout_p": "0.5"}, {"dropout_p": True}, {"dropout_p": 1.01}], ids=str)
def test_what_is_no_probability_is_refused(arguments):
    q, k, v = tensors(1, 1, 1, 4, 4, 8, torch.float32)
    with pytest.raises(fg.VariantError, match="probability"):
        fg.compile(fg.Variant())(q, k, v, **arguments)
    with pytest.raises(fg.VariantError, match="probability"):
        reference(fg.Variant(), q, k, v, **arguments)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True, "1"])
def test_what_is_no_seed_is_refused(seed):
    q, k, v = tensors(1, 1, 1, 4, 4, 8, torch.float32)
    with pytest.raises(fg.VariantError, match="seed"):
        fg.compile(fg.Variant())(q, k, v, dropout_p=0.5, seed=seed)


def test_numbers_of_numpy_are_numbers():
    kernel, q = fg.compile(fg.Variant()), torch.randn(1, 2, 40, 16)
    for seed in (7, 2**64 - 3):
        assert torch.equal(kernel(q, q, q, dropout_p=np.float64(0.25), seed=np.uint64(seed)), kernel(q, q, q, dropout_p=0.25, seed=seed))
