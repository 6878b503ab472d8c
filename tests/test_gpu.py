"""Is every variant right on the GPU? The same cases as on the CPU, on the device that is there.

Each runs with the family that the device's chip is served by and, where that is another, with sm80, which every other chip gets.
"""

from __future__ import annotations

import functools

import cases_faults
import cases_variants
import judge
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

import flashgen as fg
from flashgen.reference import reference

pytestmark = pytest.mark.gpu
FAMILIES = [None, "sm80"]
KINDS = [(torch.bfloat16, None), (torch.float16, None), (torch.float32, None), (torch.bfloat16, "sm80"), (torch.float16, "sm80")]  # float32 is sm80's anyway
SCENARIOS = [s for s in cases_faults.SYSTEM if s["needs"] in ("any", "cuda") and s["kind"] not in judge.AVAILABLE_LATER]


@pytest.mark.parametrize("stretch", [1, 5])
@pytest.mark.parametrize(("dtype", "family"), KINDS, ids=str)
@pytest.mark.parametrize("name", cases_variants.CASES)
def test_variant(name, dtype, family, stretch):
    assert not judge.variant_problems(cases_variants.CASES[name], dtype=dtype, device="cuda", stretch=stretch, family=family)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("case", judge.fault_cases("cuda", 2e10), ids=lambda c: c["id"])
def test_fault(case, family):
    assert not judge.fault_problems(case, device="cuda", family=family)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s["id"])
def test_scenario(scenario, family):
    scenario["run"](functools.partial(judge.attention, family=family), "cuda")


def _causal(family, *, heads=16, kv_heads=4, length=4096, deterministic=None, **variant):
    shapes = [(2, n, length, 128) for n in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in shapes)
    return fg.compile(fg.Variant(mask=fg.causal, **variant), family=family, deterministic=deterministic), q, k, v


def _bytes(*tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_memory_is_that_of_the_results_and_one_float32_dq(family):
    kernel, q, k, v = _causal(family)
    dout, rows = torch.randn_like(q), 2 * (16 + 16) * 4096  # B * H * (Lq + Lk)
    for _ in range(2):  # the first one builds and allocates what is kept
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = kernel(q, k, v)
        held = _bytes(out) + 4 * 2 * 16 * 4096  # with lse
        forward = torch.cuda.max_memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(out, (q, k, v), dout)
        backward = torch.cuda.max_memory_allocated() - before - held
    assert forward <= held + (1 << 20)
    assert backward <= _bytes(q, k, v) + 4 * q.numel() + 32 * rows + (1 << 20)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_results_repeat_bit_by_bit(family):
    """The forward always; gradients when asked."""
    kernel, q, k, v = _causal(family, length=777, deterministic=True, score=fg.softcap(20.0))
    dout, seen = torch.randn_like(q), []
    for _ in range(20):
        out, aux = kernel(q, k, v, return_aux=True)
        seen.append((out, aux.lse, *torch.autograd.grad(out, (q, k, v), dout)))
    assert all(torch.equal(a, b) for later in seen[1:] for a, b in zip(seen[0], later))


LENGTH = 2304  # 18 tiles of 128: several times what a producer classifies at once


def sparse_masks(device):
    """Masks of which most tiles are empty: holes between ranges, explicit blocks that are whole tiles and that are not, documents."""
    generator = torch.Generator().manual_seed(4)
    few = lambda size, *heads: (torch.rand(*heads, -(-LENGTH // size), -(-LENGTH // size), generator=generator) < 0.1).to(device)  # noqa: E731
    first, ids = fg.mask(lambda b, h, q, k: k < 4), torch.arange(LENGTH, dtype=torch.int32, device=device) // 300
    return {
        "sink and window": fg.causal & (fg.sliding_window(200, 0) | first), "a prefix": fg.mask(lambda b, h, q, k: k < 300) | fg.sliding_window(99, 0),
        "dilated": fg.dilated(5) & fg.causal, "chunked": fg.chunked(700) & fg.causal, "butterfly": fg.block_sparse(fg.butterfly(16).to(device), 144),
        "local and global": fg.causal & fg.block_sparse(fg.local_global(36).to(device), 64), "few blocks of 128": fg.block_sparse(few(128, 2, 2), 128),
        "few blocks of 64": fg.block_sparse(few(64, 2), 64), "few blocks of 48": fg.block_sparse(few(48), 48), "few blocks of 7": fg.block_sparse(few(7), 7),
        "blocks and documents": fg.block_sparse(few(128, 2), 128) & fg.document(ids) | first, "documents": fg.document(ids) & fg.causal,
        "nothing": fg.block_sparse(torch.zeros(18, 18, dtype=torch.bool, device=device), 128),
    }  # fmt: skip


def check(kernel, variant, which, head_dim=64):
    """Output and gradients of bfloat16 inputs against fp64, and that the passes are of the family."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, LENGTH, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    assert all(kernel.plan(q, k, v, which=n).family == which for n in ("forward", "backward"))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, want = kernel(q, k, v), reference(variant, *exact)[0]
    dout = torch.randn_like(out)
    for x, y in zip((out, *torch.autograd.grad(out, (q, k, v), dout)), (want, *torch.autograd.grad(want, exact, dout.double()))):
        assert (x.double() - y).norm() <= 0.01 * y.norm()


@pytest.mark.parametrize("family", ["sm90", "sm80"])
@pytest.mark.parametrize(("head_dim", "deterministic"), [(64, False), (128, False), (128, True), (256, False)])
@pytest.mark.parametrize("name", sparse_masks("cpu"))
def test_empty_tiles_are_stepped_over(name, head_dim, deterministic, family):
    if family == "sm90" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    variant = fg.Variant(mask=sparse_masks("cuda")[name])
    check(fg.compile(variant, family=family, deterministic=deterministic), variant, family, head_dim)


def test_lists_of_a_block_mask_per_batch_item_and_head():
    present = (torch.rand(2, 2, 18, 18, generator=torch.Generator().manual_seed(6)) < 0.2).cuda().tril()
    order = torch.argsort(present.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    lists = BlockMask.from_kv_blocks(present.sum(-1).to(torch.int32), order, BLOCK_SIZE=128, mask_mod=lambda b, h, q, k: q >= k, seq_lengths=(LENGTH, LENGTH))
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, LENGTH, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, want = fg.flex_attention(q, k, v, block_mask=lists), reference(fg.Variant(mask=fg.block_sparse(present, 128) & fg.causal), *exact)[0]
    dout = torch.randn_like(out)
    for x, y in zip((out, *torch.autograd.grad(out, (q, k, v), dout)), (want, *torch.autograd.grad(want, exact, dout.double()))):
        assert (x.double() - y).norm() <= 0.01 * y.norm()


def test_a_captured_graph_reads_new_blocks():
    blocks, others = (torch.rand(2, 18, 18, 18, generator=torch.Generator().manual_seed(7)) < 0.2).cuda()[:, :2]
    variant = fg.Variant(mask=fg.block_sparse(blocks, 128))
    kernel = fg.compile(variant)
    q, k, v = (torch.randn(1, 2, LENGTH, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    kernel(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel(q, k, v)
    blocks.copy_(others)
    graph.replay()
    want = reference(variant, q.double(), k.double(), v.double())[0]
    assert (out.double() - want).norm() <= 0.01 * want.norm()


HOPPER = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="of the kernels for Hopper")
WINDOW = fg.causal & fg.sliding_window(left=300, right=0)


@HOPPER
def test_a_backward_of_hopper_sums_dq_in_memory_for_a_few_heads():
    """At most 64 MiB beside the gradients, where a float32 copy of dq is 128."""
    kernel, q, k, v = _causal(None, heads=8, kv_heads=8, length=16384)
    out = kernel(q, k, v)
    dout = torch.randn_like(out)
    torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)  # builds
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    assert torch.cuda.max_memory_allocated() - before - _bytes(*gradients) <= 64 << 20


@HOPPER
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", [None, fg.causal, WINDOW], ids=["full", "causal", "window"])
@pytest.mark.parametrize("dim", [64, 128])
def test_sections_of_dq_follow_each_other(dim, mask, deterministic):
    """Many sections of one head each, against one for all; additions in order repeat bit by bit."""
    q, k, v, dout = (torch.randn(2, heads, 1500, dim, device="cuda").bfloat16() for heads in (16, 8, 8, 16))
    variant, found = fg.Variant(mask=mask), []
    for plan in ({"sum_bytes": 1, "sms": 1}, {"sum_bytes": 1, "sms": 1}, {"sum_bytes": 2**31 - 1}):
        inputs = [t.detach().requires_grad_() for t in (q, k, v)]
        found.append(torch.autograd.grad(fg.compile(variant, deterministic=deterministic, plan=plan)(*inputs), inputs, dout))
    for first, again, other in zip(*found):
        assert not deterministic or torch.equal(first, again)
        assert (first - other).float().norm() <= 2e-3 * other.float().norm()


@HOPPER
def test_a_learned_table_along_diagonals():
    """Against the sums of all pairs that a deterministic backward makes."""
    q, k, v, dout = (torch.randn(1, 4, 1111, 128, device="cuda").bfloat16().requires_grad_() for _ in range(4))
    table = torch.randn(4, 401, device="cuda", requires_grad=True)
    variant = fg.Variant(mask=fg.causal, score=fg.relative_bias(table))
    diagonals, pairs = (torch.autograd.grad(fg.compile(variant, deterministic=d)(q, k, v), table, dout.detach())[0] for d in (False, True))
    assert (diagonals - pairs).norm() <= 4e-3 * pairs.norm()


WAYS = {
    "first": {}, "dq in the same step": {"late": 0}, "keys are drawn": {"persistent": 1}, "a block for each keys": {"persistent": 0, "kv_stages": 1},
    "dq from registers": {"dq_staged": 0, "persistent": 0, "kv_stages": 1},
}  # fmt: skip
LONG = {"full": fg.Variant(), "capped": fg.Variant(mask=fg.causal, score=fg.softcap(5.0)), "window": fg.Variant(mask=WINDOW)}


@HOPPER
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("variant", LONG)
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_a_long_backward_in_every_way(dim, variant, way):
    """Beside float64; the lengths are those of which plans are chosen that compute dQ a step later."""
    q, k, v, dout = (torch.randn(1, heads, length, dim, device="cuda").bfloat16() for heads, length in ((4, 1290), (2, 1210), (2, 1210), (4, 1290)))
    inputs, exact = ([t.to(dtype).requires_grad_() for t in (q, k, v)] for dtype in (torch.bfloat16, torch.float64))
    found = torch.autograd.grad(fg.compile(LONG[variant], family="sm90", plan=WAYS[way])(*inputs), inputs, dout)
    for gradient, wanted in zip(found, torch.autograd.grad(reference(LONG[variant], *exact)[0], exact, dout.double())):
        assert (gradient - wanted).norm() <= 2**-7 * wanted.norm()
