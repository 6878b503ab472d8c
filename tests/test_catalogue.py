"""Does every mask and score of the catalogue equal its formula, entry by entry, and do Variants compose, copy and pickle?"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import pickle

import cases_variants
import probes
import pytest
import torch

import flashgen as fg
from flashgen.form import Form

B, H = 2, 3
LENGTHS = [(12, 12), (5, 13), (13, 5), (1, 9), (9, 1)]
G = torch.Generator().manual_seed(11)
LONG = 40  # tables cover the longest case
IDS = torch.randint(0, 3, (B, LONG), generator=G, dtype=torch.int32)
FLAGS = torch.rand(LONG, generator=G) < 0.2
COUNTS = torch.tensor([4, 9], dtype=torch.int32)


def natten(shape, window, dilation):
    """The keys of each query, from NATTEN's definition: on every axis the window of neighbours of the query's residue class, its centre clamped."""
    axes = []
    for n, w, d in zip(shape, window, dilation):
        near = []
        for i in range(n):
            group = list(range(i % d, n, d))
            start = max(0, min(group.index(i) - w // 2, len(group) - w))
            near.append(set(group[start : start + w]))
        axes.append(near)
    places = list(itertools.product(*map(range, shape)))
    return lambda b, h, q, k: all(y in near[x] for near, x, y in zip(axes, places[q], places[k]))


def masks(q_len, kv_len):
    """name -> (mask of the catalogue, its formula)."""
    off = kv_len - q_len
    block = torch.rand(B, H, -(-q_len // 4), -(-kv_len // 4), generator=G) < 0.5
    dense = torch.rand(B, H, q_len, kv_len, generator=G) < 0.5
    ids, kv_ids = IDS[:, :q_len], IDS[:, LONG - kv_len :]
    found = {
        "causal": (fg.causal, lambda b, h, q, k: k <= q + off),
        "causal_top_left": (fg.causal_top_left, lambda b, h, q, k: k <= q),
        "prefix_lm": (fg.prefix_lm(4), lambda b, h, q, k: k < 4 or k <= q + off),
        "prefix_lm per item": (fg.prefix_lm(COUNTS), lambda b, h, q, k: k < COUNTS[b] or k <= q + off),
        "document": (fg.document(IDS[0]), lambda b, h, q, k: IDS[0, q] == IDS[0, k]),
        "document per item": (fg.document(ids, kv_ids), lambda b, h, q, k: ids[b, q] == kv_ids[b, k]),
        "chunked": (fg.chunked(4), lambda b, h, q, k: (q + off) // 4 == k // 4),
        "chunked by 3": (fg.chunked(3), lambda b, h, q, k: (q + off) // 3 == k // 3),
        "dilated": (fg.dilated(3), lambda b, h, q, k: (q + off - k) % 3 == 0),
        "padding": (fg.padding(COUNTS), lambda b, h, q, k: k < COUNTS[b]),
        "global_tokens": (fg.global_tokens(FLAGS), lambda b, h, q, k: FLAGS[q] or FLAGS[k]),
        "block_sparse": (fg.block_sparse(block, 4), lambda b, h, q, k: block[b, h, q // 4, k // 4]),
        "block_sparse of every head": (fg.block_sparse(block[:1, :1], 4), lambda b, h, q, k: block[0, 0, q // 4, k // 4]),
        "from_dense": (fg.from_dense(dense), lambda b, h, q, k: dense[b, h, q, k]),
        "from_dense of two dimensions": (fg.from_dense(dense[0, 0]), lambda b, h, q, k: dense[0, 0, q, k]),
        "from_dense of a key row": (fg.from_dense(dense[:, :1, :1]), lambda b, h, q, k: dense[b, 0, 0, k]),
        "from_dense of one value": (fg.from_dense(torch.tensor(False)), lambda b, h, q, k: False),
        "and": (fg.causal & fg.dilated(2), lambda b, h, q, k: k <= q + off and (q + off - k) % 2 == 0),
        "or": (fg.causal | fg.chunked(4), lambda b, h, q, k: k <= q + off or (q + off) // 4 == k // 4),
        "not": (~fg.causal, lambda b, h, q, k: not k <= q + off),
        "with functions": (fg.causal & (lambda b, h, q, k: h > 0) | (lambda b, h, q, k: k == 0), lambda b, h, q, k: (k <= q + off and h > 0) or k == 0),
        "function first": ((lambda b, h, q, k: k == 0) | fg.causal, lambda b, h, q, k: k == 0 or k <= q + off),
    }
    for left, right in itertools.product((-1, 0, 3), (-1, 0, 2)):

        def inside(b, h, q, k, left=left, right=right):
            return (left < 0 or k >= q + off - left) and (right < 0 or k <= q + off + right)

        found[f"sliding_window({left}, {right})"] = (fg.sliding_window(left, right), inside)
    return found


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", masks(12, 12))
def test_a_mask_is_its_formula(name, lengths):
    mask, formula = masks(*lengths)[name]
    assert torch.equal(probes.table(mask, *lengths, batch=B, heads=H), probes.brute(formula, *lengths, batch=B, heads=H))


GRIDS = [((9,), 3, 1), ((9,), 4, 2), ((10,), 3, 3), ((5, 6), (3, 4), 1), ((5, 7), 2, (2, 3)), ((3, 4, 5), (3, 1, 3), 1), ((4, 4, 5), 2, (2, 1, 2)), (7, 7, 1)]


@pytest.mark.parametrize("shape, window, dilation", GRIDS, ids=str)
def test_neighborhood_is_nattens(shape, window, dilation):
    grid = (shape,) if isinstance(shape, int) else shape
    per_axis = lambda x: (x,) * len(grid) if isinstance(x, int) else x  # noqa: E731
    n = math.prod(grid)
    got = probes.table(fg.neighborhood(shape, window, dilation), n, n)
    assert torch.equal(got, probes.brute(natten(grid, per_axis(window), per_axis(dilation)), n, n))
    assert (got.sum(-1) == math.prod(per_axis(window))).all(), "every query sees prod(window) keys"


# ---- scores


def slopes_of_the_paper(heads):
    """The published code of ALiBi."""

    def power_of_two(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(heads).is_integer():
        return power_of_two(heads)
    closest = 2 ** math.floor(math.log2(heads))
    return power_of_two(closest) + slopes_of_the_paper(2 * closest)[0::2][: heads - closest]


def t5_bucket(relative, bidirectional, buckets, max_distance):
    """The published code of T5's relative position buckets, float32."""
    found = torch.zeros_like(relative)
    if bidirectional:
        buckets //= 2
        found += (relative > 0).long() * buckets
        relative = relative.abs()
    else:
        relative = -torch.min(relative, torch.zeros_like(relative))
    exact = buckets // 2
    large = exact + (torch.log(relative.float() / exact) / math.log(max_distance / exact) * (buckets - exact)).long()
    return found + torch.where(relative < exact, relative, torch.min(large, torch.full_like(large, buckets - 1)))


def score_grid(score, q_len, kv_len, *, heads=H, real=torch.float64):
    traced = probes.trace(score=score)
    s = torch.randn(B, heads, q_len, kv_len, generator=G, dtype=real)
    return s, probes.value(traced, traced.form.score, probes.axes({"b": B, "h": heads, "q": q_len, "k": kv_len}, s=s), real).expand(s.shape)


SCORE_NAMES = ("softcap", "alibi", "alibi slopes", "alibi per item", "relative", "relative per head", "bias", "bias of heads", "bias of keys", "chain")


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", SCORE_NAMES)
def test_a_score_is_its_formula(name, lengths):
    q_len, kv_len = lengths
    distance = torch.arange(q_len).view(-1, 1) + kv_len - q_len - torch.arange(kv_len)
    per_head, per_item = torch.rand(H, generator=G).double(), torch.rand(B, H, generator=G).double()
    table, tables = torch.randn(9, generator=G).double(), torch.randn(H, 9, generator=G).double()
    full = torch.randn(B, H, q_len, kv_len, generator=G).double()
    place = distance.clamp(-4, 4) + 4
    paper = torch.tensor(slopes_of_the_paper(H), dtype=torch.float64).view(H, 1, 1)
    catalogue = {
        "softcap": (fg.softcap(3), lambda s: 3 * torch.tanh(s / 3)),
        "alibi": (fg.alibi(), lambda s: s - paper * distance.abs()),
        "alibi slopes": (fg.alibi(per_head), lambda s: s - per_head.view(H, 1, 1) * distance.abs()),
        "alibi per item": (fg.alibi(per_item), lambda s: s - per_item.view(B, H, 1, 1) * distance.abs()),
        "relative": (fg.relative_bias(table), lambda s: s + table[place]),
        "relative per head": (fg.relative_bias(tables), lambda s: s + tables[:, place]),
        "bias": (fg.bias(full), lambda s: s + full),
        "bias of heads": (fg.bias(full[:1, :, :1, :1]), lambda s: s + full[:1, :, :1, :1]),
        "bias of keys": (fg.bias(full[0, 0, 0]), lambda s: s + full[0, 0, 0]),
        "chain": (fg.softcap(2.0) >> fg.bias(full) >> (lambda s, b, h, q, k: s * 2), lambda s: (2 * torch.tanh(s / 2) + full) * 2),
    }  # fmt: skip
    score, formula = catalogue[name]
    s, got = score_grid(score, q_len, kv_len)
    tolerance = 1e-6 if name == "alibi" else 1e-14  # the paper's slopes are float32 arithmetic of the head
    torch.testing.assert_close(got, formula(s), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 20, 32, 71, 128, 1000])
def test_alibi_slopes_are_the_papers_for_any_number_of_heads(heads):
    traced = probes.trace(score=fg.alibi())
    symbols = probes.axes({"b": 1, "h": heads, "q": 1, "k": 2}, s=torch.zeros((), dtype=torch.float64))
    got = -probes.value(traced, traced.form.score, symbols, torch.float64)[0, :, 0, 0]  # distance 1
    torch.testing.assert_close(got, torch.tensor(slopes_of_the_paper(heads), dtype=torch.float64), rtol=1e-6, atol=0)


T5 = [(32, True, 128), (32, False, 128), (16, True, 64), (64, False, 256), (8, True, 20), (20, True, 100)]


@pytest.mark.parametrize("buckets, bidirectional, max_distance", T5, ids=str)
def test_t5_buckets_are_the_published_ones(buckets, bidirectional, max_distance):
    table = torch.arange(buckets * H, dtype=torch.float64).view(buckets, H)
    q_len, kv_len = 300, 310
    s, got = score_grid(fg.t5_bias(table, bidirectional, max_distance), q_len, kv_len)
    relative = torch.arange(kv_len) - (torch.arange(q_len).view(-1, 1) + kv_len - q_len)
    bucket = t5_bucket(relative, bidirectional, buckets, max_distance)
    assert torch.equal((got - s).round().long(), table.long()[bucket].permute(2, 0, 1).expand(B, -1, -1, -1))


def test_a_bias_of_minus_infinity_masks_and_other_entries_do_not():
    bias = torch.randn(4, 6, generator=G)
    bias[1, 2] = bias[3] = -math.inf
    variant = fg.Variant(mask=fg.causal, score=fg.softcap(3.0) >> fg.bias(bias))
    traced = variant.trace({})
    got = probes.value(traced, traced.form.mask, probes.axes({"b": 1, "h": 1, "q": 4, "k": 6}))
    assert torch.equal(got[0, 0], (bias != -math.inf) & probes.table(fg.causal, 4, 6)[0, 0])
    assert len(traced.captures) == 1, "the bias is one capture of both functions"


# ---- the shared table of variants


@functools.cache
def case(name):
    run = cases_variants.instantiate(name, dtype=torch.float64)
    traced = probes.trace(score=run.mods.score, mask=run.mods.mask)
    shape = run.shape
    return run, traced, {"b": shape["B"], "h": shape["Hq"], "q": shape["Lq"], "k": shape["Lk"]}


@pytest.mark.parametrize("name", cases_variants.CASES)
def test_every_case_traces_to_its_own_meaning(name):
    run, traced, sizes = case(name)
    grid = probes.axes(sizes)
    b, h, q, k = (grid[n].long() for n in "bhqk")
    shape = tuple(sizes.values())
    if run.mods.mask is not None and traced.form.mask >= 0:
        assert torch.equal(probes.value(traced, traced.form.mask, grid, torch.float64).expand(shape), run.mods.mask(b, h, q, k).expand(shape))
    if traced.form.score >= 0:
        s = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        seen = run.mods.mask(b, h, q, k).expand(shape) if run.mods.mask is not None else torch.ones(shape, dtype=torch.bool)
        clamped = [torch.minimum(x, torch.tensor(n - 1)) for x, n in zip((b, h, q, k), shape)]
        got, wanted = probes.value(traced, traced.form.score, grid | {"s": s}, torch.float64).expand(shape), run.ref_score(s, *clamped).expand(shape)
        torch.testing.assert_close(got[seen], wanted[seen], rtol=2e-7 if "trans" in run.case.needs else 1e-12, atol=1e-12, equal_nan=True)
    assert Form.parse(traced.form.text) == traced.form


# ---- Variants as objects


def test_masks_and_scores_are_decorators():
    @fg.mask
    def diagonal(b, h, q_idx, kv_idx):
        return q_idx == kv_idx

    @fg.score
    def doubled(score, b, h, q_idx, kv_idx):
        return score * 2

    assert repr(diagonal & fg.causal) == "Mask((diagonal & causal))" and repr(doubled >> fg.softcap(2.0)) == "Score(doubled >> softcap(2.0))"
    assert probes.table(diagonal & fg.causal, 3, 3).sum() == 3
    assert fg.mask(diagonal) is diagonal


def learned_variant():
    table = torch.nn.Parameter(torch.randn(H, 9, generator=G))
    return fg.Variant(
        head_dim=(64, 32), mask=fg.causal & (lambda b, h, q, k: IDS[b, q] == IDS[b, k]), scale=0.5, sink=True,
        score=fg.relative_bias(table) >> (lambda s, b, h, q, k: s + torch.sigmoid(table)[h, k % 9] + table.T[:, 1][q % 9]),
    )  # fmt: skip


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda v: pickle.loads(pickle.dumps(v))], ids=["deepcopy", "copy", "pickle"])
def test_a_variant_survives_a_copy_with_its_form_and_captures(copied):
    variant = learned_variant()
    other = copied(variant)
    before, after = variant.trace({}), other.trace({})
    assert (other.head_dim, other.scale, other.sink, other.inputs) == ((64, 32), 0.5, True, {})
    assert before.form == after.form and before.floats == after.floats and before.ints == after.ints
    for old, new in zip(probes.replayed(before), probes.replayed(after)):
        assert torch.equal(old, new) and new.requires_grad == old.requires_grad
    assert probes.trace(mask=fg.causal).form != after.form


@pytest.mark.parametrize("sizes", [(16, 7), (7, 16)])
def test_one_tensor_of_blocks_has_one_block_size(sizes):
    blocks = torch.ones(3, 3, dtype=torch.bool)
    mask = fg.block_sparse(blocks, sizes[0]) & fg.block_sparse(blocks, sizes[1])
    with pytest.raises(fg.VariantError, match="clone"):
        fg.Variant(mask=mask)
    fg.Variant(mask=fg.block_sparse(blocks, 16) & fg.block_sparse(blocks.clone(), 7) & ~fg.block_sparse(blocks, 16))


def test_a_deepcopy_owns_its_captures():
    variant = learned_variant()
    other = copy.deepcopy(variant)
    with torch.no_grad():
        next(c.tensor for c in variant.trace({}).captures if isinstance(c.tensor, torch.nn.Parameter)).zero_()
    assert not any(torch.equal(a, b) for a, b in zip(probes.replayed(variant.trace({})), probes.replayed(other.trace({}))) if a.requires_grad)


def test_equal_structure_is_an_equal_form_whatever_the_tensors():
    forms = {probes.trace(mask=fg.document(ids), score=fg.alibi(slopes)).form for ids, slopes in [(IDS[0], torch.rand(4)), (IDS[1], torch.rand(7))]}
    assert len(forms) == 1
    assert probes.trace(mask=fg.document(IDS[0].long())).form != probes.trace(mask=fg.document(IDS[0])).form
