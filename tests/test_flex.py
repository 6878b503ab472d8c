"""Does FlexAttention code run by changing its import: same outputs, statistics, gradients and errors as torch's, eager and under torch.compile?"""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
import torch._dynamo.testing
import torch.nn.attention.flex_attention as torch_flex
from flex_functions import IDS, MASKS, SCORES, B, H, N, learned, on
from torch._higher_order_ops.flex_attention import math_attention

import flashgen as fg
from flashgen import block_mask, closures

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PAIRS = [(score, list(MASKS)[n % len(MASKS)]) for n, score in enumerate(SCORES)]  # every score function and every mask at least once
ONE_OF_EACH_KIND = ("relative", "indexed twice", "0-d", "two tensors", "derived")  # of the learned functions


def qkv(batch=B, heads=H, kv_heads=H, q_len=N, kv_len=N, dim=16, grad=False, device="cpu"):
    g = torch.Generator().manual_seed(5)
    shapes = [(batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, dim)]
    return [torch.randn(s, generator=g).to(device).requires_grad_(grad) for s in shapes]


def expected(q, k, v, score=None, mask=None, scale=None):
    """torch's eager path, called below the check that refuses gradients on a CPU: out, lse, max_scores."""
    score = torch_flex._identity if score is None else score
    mask = torch_flex.noop_mask if mask is None else mask
    out, lse, top = math_attention(q, k, v, score, (mask,), q.shape[-1] ** -0.5 if scale is None else scale, {})
    return out, lse * math.log(2), top * math.log(2)


def attend(q, k, v, score=None, mask=None, compiled=False, **options):
    made = None if mask is None else fg.create_block_mask(mask, q.shape[0], q.shape[1], q.shape[2], k.shape[2], device=q.device)
    function = torch.compile(fg.flex_attention, backend="aot_eager", fullgraph=True) if compiled else fg.flex_attention
    out, aux = function(q, k, v, score, made, return_aux=fg.AuxRequest(lse=True, max_scores=True), **options)
    return out, aux.lse, aux.max_scores


def close(got, want, atol=3e-5):
    for a, b in zip(got, want, strict=True):
        rtol = 2e-4 if a.is_cuda else 3e-5  # q . k is summed in another order there, which 1 / s near 0 magnifies
        torch.testing.assert_close(a, b, atol=atol, rtol=rtol, equal_nan=True)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("score", "mask"), PAIRS, ids=lambda name: name.replace(" ", "_"))
def test_examples_give_what_torch_gives(score, mask, compiled, device):
    tensors, functions = qkv(device=device), on(device)
    score, mask = functions.SCORES[score], functions.MASKS[mask]
    close(attend(*tensors, score, mask, compiled), expected(*tensors, score, mask))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "compiled"), [*((name, False) for name in learned()), *((name, True) for name in ONE_OF_EACH_KIND)], ids=str)
def test_gradients_of_learned_captures(name, compiled, device):
    score, parameters = on(device).learned()[name]
    mask = MASKS["causal window"]
    leaves = [*qkv(grad=True, device=device), *parameters]
    weight = torch.randn(B, H, N, 16, generator=torch.Generator().manual_seed(1)).to(device)

    def gradients(out, lse, _):
        return torch.autograd.grad((out * weight).sum() + lse.sin().sum(), leaves)

    # index tensors that broadcast, in place of torch's vmap, which has no rule for some of these gradients
    axis = lambda at, n: torch.arange(n, device=device).view([-1 if i == at else 1 for i in range(4)])  # noqa: E731
    b, h, q, k = axis(0, B), axis(1, H), axis(2, N), axis(3, N)
    plain = (lambda s, b, h, q, k: s + parameters[0][q, k]) if name == "chained" else score
    s = plain(leaves[0] @ leaves[1].transpose(-1, -2) / 4, b, h, q, k).masked_fill(~mask(b, h, q, k), float("-inf"))
    want = gradients(s.softmax(-1) @ leaves[2], s.logsumexp(-1), None)
    close(gradients(*attend(*leaves[:3], score, mask, compiled=compiled)), want, atol=2e-4)


def test_gradients_of_inputs_through_torch_itself():
    leaves, weight = qkv(grad=True), torch.randn(B, H, N, 16)
    found = []
    for out, lse, _ in (attend(*leaves, SCORES["softcap"], MASKS["empty rows"]), expected(*leaves, SCORES["softcap"], MASKS["empty rows"])):
        rows = torch.isfinite(lse)
        found.append(torch.autograd.grad((out * weight).sum() + lse[rows].sum(), leaves))
    close(*found)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads(kv_heads, compiled):
    q, k, v = qkv(kv_heads=kv_heads, q_len=20)
    score, mask = SCORES["head shift"], lambda b, h, q, k: q + 3 * h >= k
    close(attend(q, k, v, score, mask, compiled, enable_gqa=True), expected(q, k, v, score, mask))


def test_what_is_returned():
    q, k, v = qkv()
    out = fg.flex_attention(q, k, v, scale=0.5)
    pair = fg.flex_attention(q, k, v, scale=0.5, return_lse=True)
    none = fg.flex_attention(q, k, v, scale=0.5, return_aux=torch_flex.AuxRequest())
    some = fg.flex_attention(q, k, v, scale=0.5, return_aux=torch_flex.AuxRequest(lse=True))
    want = expected(q, k, v, scale=0.5)
    close([out, *pair, none[0], some[0], some[1].lse], [want[0], want[0], want[1], want[0], want[0], want[1]])
    assert isinstance(some[1], torch_flex.AuxOutput) and some[1].max_scores is None and none[1] == torch_flex.AuxOutput()


def test_rows_without_a_key():
    q, k, v = qkv(grad=True)
    out, lse, top = attend(q, k, v, mask=lambda b, h, q, k: q < 30)
    assert not out[:, :, 30:].any() and (lse[:, :, 30:] == -math.inf).all() and (top[:, :, 30:] == -math.inf).all()
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert not grad[:, :, 30:].any()


def test_narrow_keys_and_one_batch_of_keys():
    q, k, v = qkv()
    close([fg.flex_attention(q, k.bfloat16(), v.bfloat16())], [fg.flex_attention(q, k.bfloat16().float(), v.bfloat16().float())])
    close(attend(q, k[:1], v[:1], mask=MASKS["even items"]), expected(q, k[:1], v[:1], mask=MASKS["even items"]))


# ---- block masks


def test_block_mask_describes_itself():
    causal = MASKS["causal"]
    ours = fg.create_block_mask(causal, B, None, 300, 200, device="cpu", BLOCK_SIZE=(64, 32))
    theirs = torch_flex.create_block_mask(causal, B, None, 300, 200, device="cpu", BLOCK_SIZE=(64, 32))
    assert ours.shape == theirs.shape and ours.seq_lengths == theirs.seq_lengths and ours.numel() == theirs.numel() and ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert torch.equal(ours.to_dense(), theirs.to_dense()) and ours.sparsity() == theirs.sparsity()
    assert "█" in str(ours) and "sparsity" in str(ours) and ours.to("cpu")._adjust(64, 64).shape == (B, 1, 64, 64)
    with pytest.raises(fg.VariantError, match="slices"):
        ours[0]


def test_a_block_mask_makes_nothing_of_its_size():
    fg.create_block_mask(MASKS["causal"], 64, 64, 1 << 30, 1 << 30)


@pytest.mark.parametrize("shape", [(None, None), (B, H), (B, None), (None, H)])
def test_a_torch_block_mask_that_says_what_its_function_says(shape):
    q, k, v = qkv()
    mask = {(None, None): MASKS["documents"], (B, None): MASKS["lengths"], (None, H): MASKS["signs"], (B, H): MASKS["sum of b and h"]}[shape]
    made = torch_flex.create_block_mask(mask, *shape, N, N, device="cpu", BLOCK_SIZE=16)
    assert block_mask.mask_of(made) is mask  # so that the kernel derives its own tiles
    close([fg.flex_attention(q, k, v, block_mask=made)], expected(q, k, v, mask=mask)[:1])


def lists(seed, per):
    """Random partial and full blocks of 16, and the elements they let through."""
    g = torch.Generator().manual_seed(seed)
    kinds = torch.randint(0, 3, (*per, N // 16, N // 16), generator=g)
    partial, full = (torch_flex._dense_to_ordered((kinds == n).to(torch.int8)) for n in (1, 2))
    whole = kinds.repeat_interleave(16, -2).repeat_interleave(16, -1)
    return (*partial, *full), whole


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("per", [(1, 1), (B, 1), (1, H), (B, H)])
def test_block_lists_are_kept_to(per, compiled):
    q, k, v = qkv()
    tensors, whole = lists(1, per)
    made = torch_flex.BlockMask.from_kv_blocks(*tensors, BLOCK_SIZE=16, mask_mod=MASKS["causal"])
    index = torch.arange(N)
    visible = (whole == 2) | ((whole == 1) & (index[:, None] >= index))
    function = torch.compile(fg.flex_attention, backend="aot_eager", fullgraph=True) if compiled else fg.flex_attention
    got = function(q, k, v, block_mask=made, return_lse=True)
    close(got, expected(q, k, v, mask=lambda b, h, q, k: visible[b * (per[0] > 1), h * (per[1] > 1), q, k])[:2])


def test_block_lists_without_a_function_and_changed_in_place():
    q, k, v = qkv()
    made = torch_flex.BlockMask.from_kv_blocks(torch.ones(1, 1, 3, dtype=torch.int32), torch.zeros(1, 1, 3, 3, dtype=torch.int32), BLOCK_SIZE=16)
    close([fg.flex_attention(q, k, v, block_mask=made)], expected(q, k, v, mask=lambda b, h, q, k: k < 16)[:1])
    made.kv_indices.fill_(2)
    close([fg.flex_attention(q, k, v, block_mask=made)], expected(q, k, v, mask=lambda b, h, q, k: k >= 32)[:1])


def test_a_sliced_torch_block_mask_needs_its_function_again():
    q, k, v = qkv(q_len=16)
    whole = torch_flex.create_block_mask(MASKS["causal"], None, None, N, N, device="cpu", BLOCK_SIZE=16)
    part = whole[:, :, torch.tensor([1])]
    part.seq_lengths = (16, N)
    with pytest.raises(RuntimeError, match="sliced"):
        fg.flex_attention(q, k, v, block_mask=part)
    part.mask_mod = lambda b, h, q, k: q + 16 >= k
    close([fg.flex_attention(q, k, v, block_mask=part)], expected(q, k, v, mask=part.mask_mod)[:1])


@pytest.mark.parametrize("module", [fg, torch_flex], ids=["flashgen", "torch"])
def test_and_or_masks(module):
    q, k, v = qkv()
    mask = module.and_masks(module.or_masks(MASKS["causal"], MASKS["two ends"]), MASKS["documents"], torch_flex.noop_mask)
    close(attend(q, k, v, mask=mask), expected(q, k, v, mask=mask))
    with pytest.raises((fg.VariantError, RuntimeError)):
        module.or_masks(3)


def test_catalogue_objects_serve_as_functions():
    q, k, v = qkv()
    table = torch.randn(H, 9)
    got = attend(q, k, v, fg.relative_bias(table) >> fg.softcap(3.0), fg.causal & fg.document(IDS))
    close([attend(q, k, v, fg.relative_bias(table) >> fg.softcap(3.0), fg.causal & fg.document(IDS), compiled=True)[0]], [got[0]])
    close([got[0]], [fg.compile(fg.Variant(score=fg.relative_bias(table) >> fg.softcap(3.0), mask=fg.causal & fg.document(IDS)))(q, k, v)])
    dense = torch.zeros(N, N).masked_fill(torch.rand(N, N) < 0.3, -math.inf)
    pair = [attend(q, k, v, fg.bias(dense), MASKS["causal"], compiled) for compiled in (False, True)]
    close(*pair)
    assert torch.equal(*(p[0] for p in pair))  # one kernel: both traces have one Form


# ---- traces


def test_a_new_closure_is_not_traced_again_and_reads_its_own_tensors(monkeypatch):
    q, k, v = qkv()
    traces = []
    real = closures._trace
    monkeypatch.setattr(closures, "_trace", lambda *functions: traces.append(1) or real(*functions))
    tables, window = [torch.randn(N, N) for _ in range(3)], 5

    def make(t):
        half = t * 0.5  # captured too
        return lambda s, b, h, q, k: s + t[q, k] + half[k, q] + (t + half).T[q, k] + window

    for t in tables:
        close([fg.flex_attention(q, k, v, make(t))], expected(q, k, v, make(t))[:1])
    assert len(traces) == 1
    window = 9
    close([fg.flex_attention(q, k, v, make(tables[0]))], expected(q, k, v, make(tables[0]))[:1])
    assert len(traces) == 2


def test_a_trace_keeps_no_tensor_alive():
    q, k, v = qkv()

    def call():
        t = torch.randn(N)
        fg.flex_attention(q, k, v, lambda s, b, h, q, k: s + t[q] + (t * 2)[k])
        return weakref.ref(t)

    gone = call()
    gc.collect()
    assert gone() is None


def test_what_python_reads_is_read_at_each_call():
    q, k, v = qkv()
    limit, holder = torch.tensor(10), Holder()
    for _ in range(2):
        known = int(limit)
        got = fg.flex_attention(q, k, v, lambda s, b, h, q, k: torch.where(k < limit.item(), s, -1.0))
        close([got], expected(q, k, v, lambda s, b, h, q, k, known=known: torch.where(k < known, s, -1.0))[:1])
        close([fg.flex_attention(q, k, v, holder.score)], expected(q, k, v, holder.score)[:1])
        limit.add_(7)
        holder.shift += 1


class Holder:
    shift = 2

    def score(self, s, b, h, q, k):
        return s + self.shift * k


def test_traces_are_bounded(monkeypatch):
    monkeypatch.setattr(closures, "MAX_TRACES", 3)
    closures._traces.clear()
    for n in range(6):
        closures.traced(lambda s, b, h, q, k, n=n: s + n, None)
    assert len(closures._traces) == 3


# ---- under torch.compile


class Layer(torch.nn.Module):
    """Functions made in forward, over parameters and activations."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(H, 2 * N))

    def forward(self, q, k, v, limit, cap):
        gate = q.mean(-1)

        def score(s, b, h, q_idx, kv_idx):
            return cap * torch.tanh(s / cap) + self.table[h, q_idx - kv_idx + N] * gate[b, h, q_idx]

        def mask(b, h, q_idx, kv_idx):
            return (kv_idx < limit) | ~(q_idx < kv_idx)

        return fg.flex_attention(q, k, v, score_mod=score, block_mask=fg.create_block_mask(mask, None, None, q.shape[2], k.shape[2]))


def test_functions_made_inside_a_compiled_module():
    layer, leaves = Layer(), qkv(grad=True)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    wanted = [*leaves, layer.table]
    for limit in (4, 9, 17):
        got, want = (f(*leaves, limit, 2.0) for f in (compiled, layer))
        close([got, *torch.autograd.grad(got.sin().sum(), wanted)], [want, *torch.autograd.grad(want.sin().sum(), wanted)], atol=1e-4)


def test_a_changed_integer_or_length_does_not_recompile_for_ever():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def call(q, k, v, window):
        return fg.flex_attention(q, k, v, lambda s, b, h, q, k: torch.where(q - k < window, s, -9.0))

    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for n in range(3, 9):
        tensors = qkv(q_len=40 + n, kv_len=40 + n)
        close([compiled(*tensors, n)], [call(*tensors, n)])
    assert counter.frame_count <= 3


def test_inductor():
    leaves = qkv(grad=True)
    table = torch.randn(2 * N, requires_grad=True)

    def call(q, k, v):
        return fg.flex_attention(q, k, v, lambda s, b, h, q, k: s + table[q - k + N])

    got, want = (f(*leaves) for f in (torch.compile(call, fullgraph=True), call))
    close([got, *torch.autograd.grad(got.sum(), [*leaves, table])], [want, *torch.autograd.grad(want.sum(), [*leaves, table])], atol=1e-3)


def test_errors_of_functions_reach_the_user_of_torch_compile():
    q, k, v = qkv()
    with pytest.raises(Exception, match=r"torch\.where"):
        torch.compile(fg.flex_attention, backend="eager", fullgraph=True)(q, k, v, lambda s, b, h, q, k: s if q > k else -s)


# ---- options and errors


def test_kernel_options_are_ignored_with_one_warning():
    program = """
import torch, warnings, flashgen as fg
q = torch.randn(1, 1, 8, 8)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for _ in range(3):
        fg.flex_attention(q, q, q, kernel_options={"BACKEND": "FLASH", "BLOCK_M": 64})
print([str(w.message) for w in seen if "kernel_options" in str(w.message)])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ignored") == 1 and "BACKEND, BLOCK_M" in done.stdout


def test_no_warning_without_options():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fg.flex_attention(*qkv(), kernel_options={})


def test_errors_are_those_of_torch():
    q, k, v = qkv()
    causal = MASKS["causal"]
    short, wide = fg.create_block_mask(causal, None, None, 32, N), fg.create_block_mask(causal, 3, None, N, N)
    cases = [
        (ValueError, "enable_gqa", (q, k[:, :2], v[:, :2]), {}),
        (ValueError, "multiple", (q, k[:, :3], v[:, :3]), {"enable_gqa": True}),
        (ValueError, "head_dim", (q, k[..., :8], v), {}),
        (ValueError, "4 dimensions", (q[0], k[0], v[0]), {}),
        (ValueError, "batch", (q, k.repeat(2, 1, 1, 1), v.repeat(2, 1, 1, 1)), {}),
        (ValueError, "lengths", (q, k, v), {"block_mask": short}),
        (ValueError, "lengths", (q, k, v), {"block_mask": torch_flex.create_block_mask(causal, None, None, N, 64, device="cpu")}),
        (ValueError, "batch size must be 1 or 2", (q, k, v), {"block_mask": wide}),
        (ValueError, "return_lse and return_aux", (q, k, v), {"return_lse": True, "return_aux": fg.AuxRequest(lse=True)}),
        (fg.VariantError, "create_block_mask", (q, k, v), {"block_mask": causal}),
        (fg.VariantError, "score function", (q, k, v), {"score_mod": causal}),
        (fg.VariantError, "flashgen.input", (q, k, v), {"score_mod": fg.bias(fg.input("t", ndim=2))}),
        (fg.DtypeError, "mixed", (q, k.double(), v.double()), {}),
    ]
    for kind, text, tensors, options in cases:
        with pytest.raises(kind, match=text) as raised:
            fg.flex_attention(*tensors, **options)
        assert isinstance(raised.value, fg.FlashgenError)
    with pytest.raises(fg.VariantError, match="mask function"):
        fg.create_block_mask(lambda s, b, h, q, k: s, None, None, N, N)


# ---- block patterns of the FlashAttention paper


def test_butterfly_blocks():
    n = 16
    want = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        want[i, i] = True
        for level in range(int(math.log2(n))):
            want[i, i ^ (1 << level)] = True
    assert torch.equal(fg.butterfly(n), want) and torch.equal(fg.butterfly(n, stride=n), want)
    assert torch.equal(fg.butterfly(11), want[:11, :11]) and torch.equal(fg.butterfly(n, stride=1), torch.eye(n, dtype=torch.bool))
    assert fg.butterfly(n, stride=4).sum(1).tolist() == [3] * n


def test_local_global_blocks():
    want = torch.tensor([[abs(i - j) <= 2 or i < 1 or j < 1 for j in range(9)] for i in range(9)])
    assert torch.equal(fg.local_global(9, window=2), want)
    assert torch.equal(fg.local_global(4, window=0, first=0), torch.eye(4, dtype=torch.bool))
    with pytest.raises(fg.VariantError, match="window"):
        fg.local_global(4, window=-1)


@pytest.mark.parametrize("pattern", [fg.butterfly, fg.local_global])
def test_block_patterns_as_masks(pattern):
    q, k, v = qkv()
    blocks = pattern(N // 8)
    got = fg.compile(fg.Variant(mask=fg.block_sparse(blocks, 8) & fg.causal))(q, k, v)
    close([got], expected(q, k, v, mask=lambda b, h, q, k: blocks[q // 8, k // 8] & (q >= k))[:1])
