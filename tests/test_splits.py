"""Is attention with its keys split among tasks or blocks the attention of all keys?"""

from __future__ import annotations

import pytest
import torch

import flashgen as fg
from flashgen import calls
from flashgen.families import Sizes, sm80, splits
from flashgen.plan import Plan

VARIANTS = {
    "plain": lambda: fg.Variant(),
    "causal_softcap": lambda: fg.Variant(mask=fg.causal, score=fg.softcap(3.0)),
    "window": lambda: fg.Variant(mask=fg.sliding_window(left=40, right=0)),
    "rows_without_keys": lambda: fg.Variant(mask=lambda b, h, q, k: (q != 1) & (k % 5 != 0)),
}


def tensors(length: int, keys: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, n, dim, generator=generator).to(dtype) for n, dim in ((length, 24), (keys, 24), (keys, 40))]


def run(variant: fg.Variant, given: list[torch.Tensor], kv_splits: int, **call):
    out, aux = fg.compile(variant, plan={"kv_splits": kv_splits})(*given, return_aux=True, **call)
    return out, aux.lse, aux.max_scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("length", "keys"), [(1, 300), (4, 65), (1, 3), (150, 200)])
@pytest.mark.parametrize("name", VARIANTS)
def test_splits_agree_with_the_whole(name, length, keys, dtype):
    given = tensors(length, keys, dtype)
    whole = run(VARIANTS[name](), given, 1)
    for count in (3, 8):
        for mine, other in zip(run(VARIANTS[name](), given, count), whole):
            torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("threads", [1, 5])
def test_their_number_follows_the_threads(threads):
    given, before = tensors(1, 700, torch.float32), torch.get_num_threads()
    whole = run(VARIANTS["causal_softcap"](), given, 1)
    torch.set_num_threads(threads)
    try:
        for mine, other in zip(run(VARIANTS["causal_softcap"](), given, 0), whole):
            torch.testing.assert_close(mine, other)
    finally:
        torch.set_num_threads(before)


def test_a_sink_counts_once():
    given, sink = tensors(1, 90, torch.float32), torch.tensor([1.5, -2.0])
    for mine, other in zip(run(fg.Variant(sink=True), given, 4, sink=sink), run(fg.Variant(sink=True), given, 1, sink=sink)):
        torch.testing.assert_close(mine, other)


def test_used_lengths_and_what_lies_behind_them():
    q, k, v = tensors(1, 90, torch.float32)
    k[1, :, 33:], v[1, :, 33:] = float("nan"), float("inf")
    used = torch.tensor([0, 33], dtype=torch.int32)
    out, lse, top = run(fg.Variant(), [q, k, v], 4, seqlens_k=used)
    assert not out[0].any() and torch.isneginf(lse[0]).all() and torch.isneginf(top[0]).all()
    torch.testing.assert_close(out[1:], run(fg.Variant(), [q[1:], k[1:, :, :33], v[1:, :, :33]], 1)[0])


@pytest.mark.parametrize("kv_splits", [0, 4])
def test_a_visible_nan_reaches_its_row_alone(kv_splits):
    q, k, v = tensors(1, 90, torch.float32)
    k[1, 0, 70] = float("nan")
    out, lse, _ = run(fg.Variant(), [q, k, v], kv_splits)
    assert torch.isnan(out[1, 0]).all() and torch.isnan(lse[1, 0]).all()
    assert torch.isfinite(out[0]).all() and torch.isfinite(out[1, 1]).all()


def test_gradients_do_not_care():
    given = [t.requires_grad_() for t in tensors(2, 90, torch.float32)]
    mine, other = (torch.autograd.grad(fg.compile(fg.Variant(), plan={"kv_splits": n})(*given).square().sum(), given) for n in (4, 1))
    for a, b in zip(mine, other):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("length", "count"), [(20, 0), (1, -1), (1, 1 << 32)])
def test_wrong_numbers_are_refused(length, count):
    with pytest.raises(fg.VariantError, match="splits"):
        run(fg.Variant(), tensors(length, 90, torch.float32), count)


@pytest.mark.parametrize("count", [2, 0, -1])
def test_packed_sequences_are_not_split(count):
    q, k, v = (t[0].transpose(0, 1) for t in tensors(4, 90, torch.float32))
    with pytest.raises(fg.VariantError, match="packed sequences"):
        fg.compile(fg.Variant(), plan={"kv_splits": count}).varlen(
            q, k, v, cu_seqlens_q=torch.tensor([0, 4], dtype=torch.int32), cu_seqlens_k=torch.tensor([0, 90], dtype=torch.int32)
        )


def test_a_machine_is_filled_and_no_more():
    plan = Plan("sm80", "forward", (("block_kv", 64), ("kv_splits", 0), ("sms", 100)))
    count = lambda blocks, keys: splits.count(plan, Sizes(1, blocks, blocks, 1, keys, 1, keys), blocks)  # noqa: E731
    assert count(8, 100_000) == 25 and count(8, 1000) == 8 and count(300, 100_000) == 1 and count(8, 10) == 1


@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.bfloat16), (128, torch.float16), (64, torch.float32)], ids=str)
def test_gpu_kernels_compile_and_declare_their_workspaces(dim, dtype):
    pytest.importorskip("cupy_backends")
    q, k = torch.zeros(1, 8, 1, dim, dtype=dtype), torch.zeros(1, 8, 4000, dim, dtype=dtype)
    kernel = fg.compile(fg.Variant(mask=fg.causal), target="sm90a", family="sm80")
    binary, plan = kernel.build(q, k, k), kernel.plan(q, k, k)
    assert {"forward", "combine"} <= {entry.name for entry in binary.report.entries} and not binary.report.faults
    handle = calls.Handle(fg.Variant(mask=fg.causal).trace({}).form.text, max_scores=True)
    call = calls.Call(q, k, k, None, None, None, None, [], [], [], 1.0, 1, 4000)
    problem, sizes = calls.forward_problem(handle, call, True), Sizes(1, 8, 8, 1, 4000, 1, 4000)
    count = sm80.numbers(problem, plan, sizes)["splits"]
    assert 1 < count <= 2 * plan.sms / 8
    wanted = {"partial_out": count * 8 * dim, "partial_lse": count * 8, "partial_max": count * 8}
    assert {w.field: w.elements for w in sm80.workspaces(problem, plan, sizes)} == wanted
    assert [launch.grid[0] for launch in sm80.launches(problem, plan, sizes)] == [8 * count, 2]
