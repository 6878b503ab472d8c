"""Is what analysis proves true? Masks, named and generated, against brute force: ranges contain the support, full tiles are all true, empty ones all false."""

from __future__ import annotations

import cases_variants
import probes
import pytest
import torch
from masks import COUNTS, EXACT, SORTED, SOUND, STARTS, generated

import flashgen as fg
from flashgen import ranges
from flashgen.analysis import analyze
from flashgen.interval import Evaluator, NumberSpans, tile_truth

LENGTHS = [(19, 19), (7, 22), (22, 7)]
TILES = [(4, 4), (5, 3), (1, 6)]


class Tile:
    """What the backend's leaves describe: rows q_first..q_last, keys k_first..k_last of one batch item and head."""

    def __init__(self, traced, q_len, kv_len, tables=None):
        self.traced, self.form, self.q_len, self.kv_len, self.tables = traced, traced.form, q_len, kv_len, tables
        self.arrays = [t.detach().numpy() for t in probes.replayed(traced)]
        self.bounds = {axis: ranges.axis_bounds(self.form, axis) for axis in "kq"}

    def spans(self, q, k, b=0, h=0):
        leaves = {"b": (b, b), "h": (h, h), "q": q, "k": k, "q_len": (self.q_len,) * 2, "kv_len": (self.kv_len,) * 2, "heads": (2, 2)}
        return NumberSpans(leaves, self.arrays, self.traced.floats, self.traced.ints, self.tables)

    def truth(self, q, k, b=0, h=0):
        return tile_truth(self.form, self.spans(q, k, b, h))

    def range(self, axis, tile, b=0, h=0):
        """[begin, end) of the other axis that the tile can meet."""
        length = self.kv_len if axis == "k" else self.q_len
        whole = (0, length - 1)
        spans = self.spans(*((tile, whole) if axis == "k" else (whole, tile)), b, h)
        lo, hi = ranges.axis_span(self.bounds[axis], Evaluator(self.form, spans), spans)
        begin, end = max(lo, 0), min(hi + 1, length)
        return (begin, end) if begin < end else (0, 0)


def tiles(length, size):
    return [(i, min(i + size, length) - 1) for i in range(0, length, size)]


def check(mask, lengths, size, *, exact=False, batch=2, heads=2):
    """Every tile of every head."""
    traced = probes.trace(mask=mask)
    q_len, kv_len = lengths
    if traced.form.mask < 0:
        return
    table = probes.table(mask, q_len, kv_len, batch=batch, heads=heads)
    tile = Tile(traced, q_len, kv_len)
    for b in range(batch):
        for h in range(heads):
            for q in tiles(q_len, size[0]):
                rows = table[b, h, q[0] : q[1] + 1]
                seen = rows.any(0).nonzero().flatten().tolist()
                begin, end = tile.range("k", q, b, h)
                assert all(begin <= k < end for k in seen), f"rows {q} see {seen}, kv_range says [{begin}, {end})"
                for k in tiles(kv_len, size[1]):
                    part = rows[:, k[0] : k[1] + 1]
                    must, may = tile.truth(q, k, b, h)
                    assert not must or part.all(), f"rows {q}, keys {k} are called full"
                    assert may or not part.any(), f"rows {q}, keys {k} are called empty"
                    if exact:
                        assert must == bool(part.all()) and may == bool(part.any()), f"rows {q}, keys {k}: must {must}, may {may}"
            for k in tiles(kv_len, size[1]):
                seen = table[b, h, :, k[0] : k[1] + 1].any(1).nonzero().flatten().tolist()
                begin, end = tile.range("q", k, b, h)
                assert all(begin <= q < end for q in seen), f"keys {k} are seen by {seen}, q_range says [{begin}, {end})"


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_usual_masks_are_classified_exactly(name, lengths):
    for size in TILES:
        check(EXACT[name], lengths, size, exact=True)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", SOUND)
def test_other_masks_are_classified_soundly(name, lengths):
    for size in TILES:
        check(SOUND[name], lengths, size)


@pytest.mark.parametrize("seed", range(80))
def test_generated_masks_are_analysed_soundly(seed):
    text, mask = generated(seed)
    for lengths, size in zip(LENGTHS, TILES):
        try:
            check(mask, lengths, size)
        except AssertionError as error:
            raise AssertionError(f"{text}: {error}") from error


def test_generated_masks_are_not_trivial():
    shares = [probes.table(generated(seed)[1], 19, 19, batch=2, heads=2).float().mean().item() for seed in range(80)]
    assert sum(0.02 < s < 0.98 for s in shares) > 50
    bounded = sum(analyze(probes.trace(mask=generated(seed)[1]).form).kv_bounded for seed in range(80))
    assert bounded > 15


# ---- bounds: closed forms are as tight as brute force where loops depend on it

TIGHT = {
    "causal": (fg.causal, True), "causal_top_left": (fg.causal_top_left, True), "window": (fg.causal & fg.sliding_window(5, 0), True),
    "right": (fg.sliding_window(-1, 2), True),
    "chunked": (fg.chunked(4), True), "padding": (fg.padding(COUNTS), True), "symmetric": (lambda b, h, q, k: (q - k).abs() < 4, True),
    "prefix": (fg.prefix_lm(6), True),
    "starts": (lambda b, h, q, k: (k >= STARTS[SORTED[q]]) & (k <= q), True), "distance": (lambda b, h, q, k: (k <= q) & (q - k <= 4), True),
    "negated": (lambda b, h, q, k: ~((k > q) | (k < q - 3)), True), "dilated": (fg.dilated(3), False), "document": (fg.document(SORTED), False),
}  # fmt: skip


@pytest.mark.parametrize("name", TIGHT)
def test_loop_bounds_are_tight(name):
    mask, bounded = TIGHT[name]
    assert analyze(probes.trace(mask=mask).form).kv_bounded == bounded
    if not bounded:
        return
    for q_len, kv_len in LENGTHS:
        tile = Tile(probes.trace(mask=mask), q_len, kv_len)
        table = probes.table(mask, q_len, kv_len, batch=2, heads=1)
        for b in range(2):
            for q in tiles(q_len, 4):
                seen = table[b, 0, q[0] : q[1] + 1].any(0).nonzero().flatten().tolist()
                assert tile.range("k", q, b) == ((seen[0], seen[-1] + 1) if seen else (0, 0)), q


MASKED = [name for name, case in cases_variants.CASES.items() if cases_variants.instantiate(case).mods.mask is not None]


@pytest.mark.parametrize("name", MASKED)
def test_every_case_is_analysed_soundly(name):
    run = cases_variants.instantiate(name)
    shape = run.shape
    traced = probes.trace(mask=run.mods.mask)
    tile = Tile(traced, shape["Lq"], shape["Lk"])
    sizes = {"b": shape["B"], "h": shape["Hq"], "q": shape["Lq"], "k": shape["Lk"]}
    table = probes.value(traced, traced.form.mask, probes.axes(sizes)).expand(tuple(sizes.values()))
    b, h = shape["B"] - 1, shape["Hq"] - 1
    for q in tiles(shape["Lq"], 16):
        rows = table[b, h, q[0] : q[1] + 1]
        begin, end = tile.range("k", q, b, h)
        assert not rows[:, :begin].any() and not rows[:, end:].any()
        for k in tiles(shape["Lk"], 16):
            part = rows[:, k[0] : k[1] + 1]
            must, may = tile.truth(q, k, b, h)
            assert (not must or part.all()) and (may or not part.any())
    for k in tiles(shape["Lk"], 16):
        columns = table[b, h, :, k[0] : k[1] + 1]
        begin, end = tile.range("q", k, b, h)
        assert not columns[:begin].any() and not columns[end:].any()


# ---- facts


def test_facts_are_said_in_prose():
    facts = analyze(probes.trace(mask=fg.causal & fg.sliding_window(7, -1), score=fg.softcap(30.0) >> fg.alibi()).form)
    assert facts.kv_text == "k <= q + kv_len - q_len and k >= q + kv_len - q_len - int_0" or "k >= " in facts.kv_text
    assert not facts.score_affine and facts.loads_per_pair == 0 and facts.has_mask and not facts.data_dependent
    assert facts.sentences[0].startswith("Keys of a row: k <= ")
    documents = analyze(probes.trace(mask=fg.document(SORTED), score=fg.relative_bias(torch.zeros(9))).form)
    assert documents.data_dependent and documents.loads_per_pair == 1 and "No closed form" in documents.sentences[0]
    assert analyze(probes.trace().form).sentences == ["No mask: every tile is full."]


def test_a_float_comparison_beyond_exact_integers_claims_nothing():
    tile = Tile(probes.trace(mask=lambda b, h, q, k: q * 1.0 <= 16777216.0), 4, 4)
    spans = NumberSpans({"q": (16777217, 16777217), "k": (0, 0)}, [], tile.traced.floats, ())
    cast = Evaluator(probes.trace(mask=lambda b, h, q, k: q <= 16777216.0).form, spans)
    assert cast.span(cast.form.mask) == (False, True), "16777217 rounds to 16777216 in float32"
