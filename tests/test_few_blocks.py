"""Does a backward of few blocks do with one launch, in which they wait for each other?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from test_repeat_gpu import agree, run

import flashgen as fg
from flashgen import families
from flashgen.analysis import analyze
from flashgen.families import Sizes
from flashgen.plan import plan, size_class
from flashgen.problem import Problem
from flashgen.reference import reference
from flashgen.target import parse

TINY, LARGE = Sizes(1, 2, 2, 64, 64, 64, 64), Sizes(4, 16, 16, 2048, 2048, 8192, 8192)
LONG = Sizes(1, 1, 1, 2048, 2048, 2048, 2048)  # few blocks, of a kernel that also serves many
FEW = {"sm90": ["backward_main"], "sm80": ["backward_main"]}
APART = {"sm90": ["backward_prepare", "backward_main"], "sm80": ["backward_prepare", "backward_main", "backward_finish"]}


def described(
    family: str, sizes: Sizes, mask: Any = None, **fields: Any
) -> tuple[list[families.Launch], Mapping[str, int], dict[str, families.Workspace]]:
    """Launches, numbers and workspaces of a backward."""
    problem = Problem("bfloat16", 64, 64, which="backward", size=size_class(sizes.q_len, sizes.kv_len), **fields)
    chosen, record = plan(analyze(fg.Variant(mask=mask).plain.form), problem, parse("sm90a"), family), families.get(family)
    return record.launches(problem, chosen, sizes), record.numbers(problem, chosen, sizes), {w.field: w for w in record.workspaces(problem, chosen, sizes)}


@pytest.mark.parametrize("family", ["sm90", "sm80"])
@pytest.mark.parametrize("mask", [None, fg.causal], ids=["full", "causal"])
def test_few_blocks_take_one_launch(family, mask):
    launches, numbers, workspaces = described(family, TINY, mask)
    assert [launch.entry for launch in launches] == FEW[family] and numbers["prepare_blocks"] == 2
    assert launches[0].grid[0] == 2 + 2 + 2, "before, over keys, rounding"
    assert workspaces["arrived"].zeroed and workspaces["arrived"].kept
    launches, numbers, workspaces = described(family, LARGE, mask)
    assert [launch.entry for launch in launches] == APART[family] and numbers["prepare_blocks"] == 0
    assert not workspaces["arrived"].zeroed, "nobody waits: nothing to clear"


def test_a_long_backward_of_few_blocks_on_sm80_rounds_apart():
    """Its kernel also serves many blocks, which are not to pay with registers."""
    launches, numbers, _ = described("sm80", LONG, fg.causal)
    assert [launch.entry for launch in launches] == ["backward_main", "backward_finish"] and numbers["prepare_blocks"] == launches[1].grid[0] > 0


@pytest.mark.parametrize("family", ["sm90", "sm80"])
def test_they_are_no_more_than_run_at_once(family):
    """On sm80 those that round come after all that they wait for."""
    described_of = [described(family, Sizes(1, heads, heads, 64, 64, 64, 64)) for heads in range(1, 80)]
    rounding = {"sm90": 0, "sm80": 1}[family]
    most = max(launches[0].grid[0] - rounding * numbers["prepare_blocks"] for launches, numbers, _ in described_of if launches[0].entry == "backward_main")
    assert 0 <= {"sm90": parse("sm90a").sms, "sm80": 64}[family] - most < 4 and described_of[-1][0][0].entry == "backward_prepare"


def test_what_comes_between_or_after_keeps_its_own_launch():
    assert [x.entry for x in described("sm90", TINY, fg.causal, deterministic=True)[0]] == ["backward_prepare", "backward_order", "backward_main"]
    assert [x.entry for x in described("sm90", TINY, deterministic=True)[0]] == ["backward_main"]
    assert [x.entry for x in described("sm80", TINY, deterministic=True)[0]] == ["backward_prepare", "backward_main", "backward_dq"]
    assert [x.entry for x in described("sm90", TINY, layout="varlen")[0]] == ["backward_list", "backward_prepare", "backward_main", "backward_finish"]
    assert [x.entry for x in described("sm80", TINY, layout="varlen")[0]] == APART["sm80"]


# ---- on a GPU: lengths of one tile of keys, so that every sum of dQ has one order


FAMILIES = [None, "sm80"]
MASKS = {"full": None, "causal": fg.causal, "window": fg.causal & fg.sliding_window(left=20, right=0)}


def make(seed: int, length: int = 64, *, dim: int = 64, heads: int = 2, kv_heads: int = 2, batch: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    counts = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(batch, n, length, dim, device="cuda", generator=generator).bfloat16().requires_grad_() for n in counts]


def poison(*tensors: torch.Tensor) -> None:
    """Leaves NaN in the memory that torch's allocator gives next to tensors like these."""
    held = [torch.full_like(t, float("nan")) for t in tensors for _ in range(2)]
    del held


def check(variant: fg.Variant, found: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    q, k, v = (t.detach().double().requires_grad_() for t in tensors[:3])
    out = reference(variant, q, k, v)[0]
    for x, exact in zip(found, (out, *torch.autograd.grad(out, (q, k, v), tensors[3].detach().double()))):
        assert (x.double() - exact).norm() <= 0.01 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_gradients_of_few_blocks(kv_heads, mask, dim, deterministic, family):
    variant = fg.Variant(mask=MASKS[mask])
    attend, tensors = fg.compile(variant, family=family, deterministic=deterministic), make(0, dim=dim, heads=4, kv_heads=kv_heads)
    first = run(attend, *tensors)
    check(variant, first, tensors)
    for _ in range(20):
        poison(*tensors)
        assert agree(run(attend, *tensors), first)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize(("length", "dim", "heads"), [(65, 64, 2), (200, 128, 2), (700, 64, 2), (700, 128, 4)])
def test_few_blocks_of_several_tiles(length, dim, heads, family):
    """The last on Hopper with more scratch than is kept."""
    variant = fg.Variant(mask=fg.causal)
    attend, tensors = fg.compile(variant, family=family), make(0, length, dim=dim, heads=heads, kv_heads=heads)
    for _ in range(20):
        poison(*tensors)
        check(variant, run(attend, *tensors), tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("wanted", [(0,), (0, 1), (0, 2), (1, 2)], ids=lambda w: "".join("qkv"[n] for n in w))
def test_some_gradients_of_few_blocks(wanted, family):
    attend, (q, k, v, dout) = fg.compile(fg.Variant(mask=fg.causal), family=family), make(0, 200)
    every = run(attend, q, k, v, dout)[1:]
    inputs = [t.detach().requires_grad_(n in wanted) for n, t in enumerate((q, k, v))]
    for _ in range(5):
        poison(*inputs)
        found = torch.autograd.grad(attend(*inputs), [inputs[n] for n in wanted], dout)
        assert all((g - every[n]).float().norm() <= 0.01 * every[n].float().norm() for g, n in zip(found, wanted))


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("kv_len", [0, 40])
def test_few_blocks_of_items_without_keys(kv_len, family):
    """Queries without any key have gradients of exactly 0, as have keys past the end of their item."""
    attend, (q, k, v, dout) = fg.compile(fg.Variant(), family=family), make(0, 70, batch=3)
    lengths = torch.tensor([0, kv_len, min(kv_len, 7)], dtype=torch.int32, device="cuda")
    k, v = (t[:, :, :kv_len].detach().requires_grad_() for t in (k, v))
    for _ in range(5):
        poison(q, k, v)
        out = attend(q, k, v, seqlens_k=lengths)
        found = torch.autograd.grad(out, (q, k, v), dout)
        for item, length in enumerate(lengths.tolist()):
            assert not found[1][item, :, length:].any() and not found[2][item, :, length:].any()
            if length == 0:
                assert not out[item].any() and not found[0][item].any()
                continue
            alone = [t[item : item + 1, :, : t.shape[2] if t is q else length].detach().double().requires_grad_() for t in (q, k, v)]
            exact = torch.autograd.grad(reference(fg.Variant(), *alone)[0], alone, dout[item : item + 1].double())
            assert all((g[item : item + 1, :, : e.shape[2]].double() - e).norm() <= 0.01 * e.norm() for g, e in zip(found, exact))


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_few_blocks_see_a_masked_nan_in_no_row(family):
    """Rows of dQ that it reached are computed again, by the blocks that round."""
    variant = fg.Variant(mask=fg.causal)
    attend, tensors = fg.compile(variant, family=family), make(0)
    with torch.no_grad():
        tensors[1][:, :, -1, 3] = tensors[2][:, :, -1, 3] = float("nan")
    found = run(attend, *tensors)[1][:, :, :-1]
    with torch.no_grad():
        tensors[1][:, :, -1] = tensors[2][:, :, -1] = 0.0
    exact = run(attend, *tensors)[1][:, :, :-1]
    assert (found - exact).float().norm() <= 0.01 * exact.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_few_blocks_after_many_and_before(family):
    attend = fg.compile(fg.Variant(mask=fg.causal), family=family)
    tiny, large = make(0), make(1, 1000, heads=16, kv_heads=16, batch=2)
    wanted = run(attend, *tiny)
    check(fg.Variant(mask=fg.causal), wanted, tiny)
    for _ in range(20):
        check(fg.Variant(mask=fg.causal), run(attend, *large), large)
        poison(*tiny)
        assert agree(run(attend, *tiny), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_few_blocks_in_graphs_and_on_streams(family):
    """Two streams, on each a graph's replays and calls beside the other's."""
    attend, streams = fg.compile(fg.Variant(mask=fg.causal), family=family), [torch.cuda.Stream() for _ in range(2)]
    inputs, graphs, captured = [make(seed) for seed in range(2)], [torch.cuda.CUDAGraph() for _ in range(2)], []
    wanted = [run(attend, *tensors) for tensors in inputs]
    for stream, tensors in zip(streams, inputs):
        with torch.cuda.stream(stream):
            run(attend, *tensors)  # warm-up
    torch.cuda.synchronize()
    for graph, stream, tensors in zip(graphs, streams, inputs):
        with torch.cuda.graph(graph, stream=stream):
            captured.append(run(attend, *tensors))
    for _ in range(20):
        for found in captured:
            for t in found:
                t.fill_(float("nan"))
        torch.cuda.synchronize()
        called = []
        for graph, stream, tensors in zip(graphs, streams, inputs):
            with torch.cuda.stream(stream):
                graph.replay()
                called.append(run(attend, *tensors))
        torch.cuda.synchronize()
        assert all(agree(found, exact) for results in (captured, called) for found, exact in zip(results, wanted))
