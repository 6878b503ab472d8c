"""Benchmark cases: what this project times is what FlexAttention is given, and operations are counted on exact pairs."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

import flashgen
from flashgen.bench import cases, peers, record
from flashgen.bench.cases import Case
from flashgen.bench.measure import _inputs, _steps, measure
from flashgen.bounds import BLOCK
from flashgen.turns import in_turn, run_for

SMALL = {"WINDOW": 24, "SINK": 5, "PREFIX": 40, "CHUNK": 32, "BLOCK": 16, "DOCUMENTS": (31, 7, 12)}


@pytest.fixture
def small(monkeypatch):
    for name, value in SMALL.items():
        monkeypatch.setattr(cases, name, value)
    for made in (cases._pairs, cases._make):
        made.cache_clear()
    yield
    for made in (cases._pairs, cases._make):
        made.cache_clear()


@pytest.mark.parametrize("name", cases.VARIANTS)
def test_both_ways_to_write_a_variant_agree(name, small):
    case = Case(1, 2, 2, 100, 16, "float64", name)
    made = case.made("cpu")
    q, k, v = torch.randn(3, 1, 2, 100, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores, index = q @ k.mT / 4, [torch.arange(n) for n in (1, 2, 100, 100)]
    b, h, i, j = torch.meshgrid(*index, indexing="ij")
    scores = scores if made.score is None else made.score(scores, b, h, i, j)
    seen = torch.ones(1, 2, 100, 100, dtype=torch.bool) if made.mask is None else create_mask(made.mask, 1, 2, 100, 100, device="cpu")
    eager = torch.where(seen, scores, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(flashgen.compile(made.variant)(q, k, v), eager)
    assert case.flops() == 4 * 2 * 16 * int(seen[0, 0].sum())


def test_every_case_of_the_presets_can_be_made():
    for case in {case for rows in record.presets().values() for case, _ in rows}:
        assert isinstance(case.made("cpu").variant, flashgen.Variant) and case.heads % case.kv_heads == 0


def test_an_unknown_variant_is_refused():
    with pytest.raises(flashgen.VariantError, match="softcap"):
        Case(1, 2, 2, 100, 16, "float64", "soft").made("cpu")


def test_peers_are_those_that_have_the_variant():
    assert set(peers.peers(Case(1, 2, 2, 100, 16, "float32", "causal"), "cpu")) == {"flashgen", "sdpa"}
    assert set(peers.peers(Case(1, 2, 2, 100, 16, "float32", "window"), "cpu")) == {"flashgen"}


def test_a_score_is_timed_beside_the_same_mask_without_it():
    for name in cases.SCORES:
        found = peers.peers(Case(1, 2, 2, 100, 16, "float32", name), "cpu")
        assert set(found) == {"flashgen", "plain"}
        assert found["plain"].variant.score is None and Case(1, 2, 2, 100, 16, "float32", name).plain.flops() == Case(1, 2, 2, 100, 16, "float32", name).flops()


def test_a_learned_table_is_timed_with_its_gradient():
    case = Case(1, 2, 2, 40, 16, "float64", "learned_table")
    made, sets = case.made("cpu"), _inputs(case, "cpu", grad=True)
    q, k, v, dout = sets[0]
    found = _steps(flashgen.compile(made.variant), sets, "backward", made.learned)[0]()
    i = torch.arange(40)
    scores = made.score(q @ k.mT / 4, 0, torch.arange(2)[:, None, None], i[:, None], i).masked_fill(i > i[:, None], -torch.inf)
    expected = torch.autograd.grad(scores.softmax(-1) @ v, (q, k, v, *made.learned), dout)
    assert len(found) == 4
    torch.testing.assert_close(found, expected)
    assert "learned_table" in {case.variant for case, what in record.presets()["gpu-variants"] if what == "backward"}


def test_what_a_mask_prepares_is_in_its_row():
    row = measure(Case(1, 1, 1, 8192, 16, "float32", "document"), "cpu", rounds=1)
    assert row["preparation"]["bytes"] == 2 * 4 * 8192 // BLOCK and 0 < row["preparation"]["ms"] < row["ms"]["flashgen"]
    assert "preparing the mask" in record.line(row)
    assert measure(Case(1, 1, 1, 64, 16, "float32", "window"), "cpu", rounds=1)["preparation"] == {}


def test_everybody_is_first_in_some_round():
    assert list(in_turn(["a", "b", "c"], 4)) == list("abc" "bca" "cab" "abc")
    assert list(in_turn([], 3)) == []
    ran = []
    run_for(0.0, lambda: ran.append(1))
    assert not ran
    run_for(0.01, lambda: ran.append(1))
    assert ran
