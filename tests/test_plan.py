"""Does the tiler return only plans that fit, for every chip, and say why others do not?"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch

import flashgen as fg
from flashgen import families
from flashgen import target as targets
from flashgen.analysis import analyze
from flashgen.plan import candidates, met, plan, size_class
from flashgen.problem import Problem

FORM = fg.Variant(mask=fg.causal, score=fg.softcap(20.0)).plain.form
FACTS = analyze(FORM)


def problems(dtypes):
    for dtype, dim, which, size in itertools.product(dtypes, (16, 40, 64, 96, 128, 192, 256), ("forward", "backward"), ("few", "short", "long")):
        yield Problem(dtype, dim, dim, which=which, size=size)


@pytest.mark.parametrize("chip", targets.NAMES)
def test_every_first_choice_fits_the_chip(chip):
    target = targets.parse(chip)
    for problem in problems(("float32", "float64") if chip == "cpu" else ("bfloat16", "float16")):
        family, _ = families.choose(problem, target)
        best = candidates(FACTS, problem, target, family)[0]
        assert not best.rejected, (problem, best.rejected)
        assert all(used <= limit for _, used, limit, _ in best.usage)
        if target.kind == "cuda":
            assert best.plan.smem_bytes <= target.smem_block_bytes


def test_a_rejection_carries_its_inequality():
    target = targets.parse("sm86")
    rejected = [c for c in candidates(FACTS, Problem("bfloat16", 256, 256, which="backward"), target, "sm80") if c.rejected]
    assert rejected and any("shared memory" in r and ">" in r for c in rejected for r in c.rejected)


def test_forced_fields_are_kept_and_unknown_ones_refused():
    target = targets.parse("cpu")
    problem = Problem("float32", 64, 64)
    assert plan(FACTS, problem, target, "cpu", {"block_kv": 32}).block_kv == 32
    with pytest.raises(fg.VariantError, match="no such field"):
        plan(FACTS, problem, target, "cpu", {"block_n": 32})


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_registers_that_setmaxnreg_cannot_give_are_refused(which):
    """It would wait forever for more than a launch has. A consumer's are as asked for, the producer has what they leave."""
    problem, target = Problem("bfloat16", 128, 128, which=which), targets.parse("sm90a")
    chosen = plan(FACTS, problem, target, "sm90").as_dict()
    own = {name: chosen[name] for name in ("consumers", "block_kv", "consumer_registers") if name in chosen}
    assert plan(FACTS, problem, target, "sm90", own).as_dict() == chosen
    assert plan(FACTS, problem, target, "sm90", {"block_kv": 128, "consumer_registers": 240}).producer_registers == 24
    more = {"producer_registers": chosen["producer_registers"] + 8}
    for wrong in ({"consumer_registers": 256}, {"consumer_registers": 233}, {"producer_registers": 16}, more):
        with pytest.raises(fg.VariantError, match=r"registers of all warpgroups|setmaxnreg|together"):
            plan(FACTS, problem, target, "sm90", {**own, **wrong})


def test_a_forced_field_comes_with_those_that_belong_to_it():
    """Not with another tile's columns: that kernel read memory which is not its own."""
    target, problem = targets.parse("sm90a"), Problem("bfloat16", 64, 64, which="backward")
    facts = analyze(fg.Variant(mask=fg.causal).plain.form)
    assert plan(facts, problem, target, "sm90").block_q == 128
    forced = plan(facts, problem, target, "sm90", {"block_q": 64})
    assert (forced.dq_columns, forced.columns_qk) == (32, 32)
    assert plan(facts, problem, target, "sm90", {"sms": 5}).sms == 5  # what no point has is put in


@pytest.mark.parametrize("wrong", [{"persistent": 1, "dq_staged": 0}, {"persistent": 0, "kv_stages": 2}], ids=str)
def test_a_backward_that_draws_its_keys_needs_what_it_is_made_of(wrong):
    target, problem = targets.parse("sm90a"), Problem("bfloat16", 64, 64, which="backward")
    assert plan(FACTS, problem, target, "sm90").persistent == 1
    with pytest.raises(fg.VariantError, match=r"persistent needs|together"):
        plan(FACTS, problem, target, "sm90", wrong)
    for other in (replace(problem, layout="varlen"), replace(problem, dk=False, dv=False), Problem("bfloat16", 256, 256, which="backward")):
        assert plan(FACTS, other, target, "sm90").persistent == 0
        with pytest.raises(fg.VariantError, match="persistent needs"):
            plan(FACTS, other, target, "sm90", {"persistent": 1})


def test_dq_a_step_later_is_for_long_dense_problems_and_two_stages():
    target, long = targets.parse("sm90a"), Problem("bfloat16", 128, 128, which="backward")
    assert plan(FACTS, long, target, "sm90").late == 1
    for other in (replace(long, size="short"), replace(long, layout="varlen"), replace(long, dropout=True)):
        assert plan(FACTS, other, target, "sm90").late == 0
    for other in (replace(long, deterministic=True), replace(long, dk=False, dv=False), Problem("bfloat16", 256, 256, which="backward")):
        assert plan(FACTS, other, target, "sm90").late == 0
        with pytest.raises(fg.VariantError, match="late needs"):
            plan(FACTS, other, target, "sm90", {"late": 1})
    for wrong in ({"stages": 1}, {"stages": 3}, {"late": 2}, {"late": -1}):
        with pytest.raises(fg.VariantError, match="late needs"):
            plan(FACTS, long, target, "sm90", {"late": 1, **wrong})


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_hopper_backward_sums_dq_for_a_few_heads_at_a_time(deterministic):
    """At most 64 MiB beside the gradients where dq has 64 itself; heads enough for a block per SM; every head's memory counted where there are few."""
    problem = Problem("bfloat16", 128, 128, which="backward", deterministic=deterministic)
    chosen = plan(FACTS, problem, targets.parse("sm90a"), "sm90")
    family = families.get("sm90")

    def megabytes(batch, heads, length):
        sizes = families.Sizes(batch, heads, heads, length, length, length, length)
        return sum(w.elements for w in family.workspaces(problem, chosen, sizes)) * 4 / 2**20, family.numbers(problem, chosen, sizes)

    for batch, heads, length in ((1, 16, 16384), (2, 16, 8192), (64, 64, 64), (16, 16, 1024), (3, 7, 1000)):
        used, numbers = megabytes(batch, heads, length)
        assert used <= 64 and numbers["sum_heads"] * numbers["kv_tiles"] >= min(132, batch * heads * numbers["kv_tiles"])
    assert megabytes(1, 1, 512)[1]["sum_sections"] == 1 and megabytes(1, 1, 512)[0] < 0.3


def test_size_classes():
    assert [size_class(q, k) for q, k in ((1, 9000), (16, 5), (17, 1024), (300, 1025))] == ["few", "few", "short", "long"]


def test_explain_names_what_binds_and_what_was_proved():
    text = fg.compile(fg.Variant(head_dim=64, mask=fg.causal & fg.sliding_window(1023, 0)), target="sm90a").explain()
    assert "k <= q + kv_len - q_len and k >= q + kv_len - q_len - 1023 (bounds of the loop; the mask itself is tested in partial tiles)" in text
    for part in ("pairs of visited tiles", "What bounds the tile", "Roofline", "4 N^2 + 4 N d", "N^2 d^2 / M", "never loaded", "sm90a"):
        assert part in text, part


GRID = fg.neighborhood((32, 32), (7, 7))


@pytest.mark.parametrize(
    ("mask", "pairs"),
    [
        (fg.causal, 1024 * 1025 // 2), (fg.sliding_window(99, 0), 1024 * 100 - 99 * 50), (GRID, 1024 * 49),
        (fg.document(torch.arange(1024) // 100), 10 * 100**2 + 24**2),
    ],
    ids=["causal", "window", "grid", "documents"],
)
def test_explain_says_how_much_of_the_visited_tiles_is_visible(mask, pairs):
    q = torch.empty(1, 1, 1024, 64)
    text = fg.compile(fg.Variant(mask=mask), target="cpu").explain(q, q, q)
    rows, columns, full, partial = map(int, re.search(r"Tiles of (\d+) x (\d+) per head: (\d+) full .*?, (\d+) partial", text).groups())
    share = int(re.search(r"Visible: about (\d+)% of the pairs in the tiles that are visited", text)[1]) / 100
    assert abs(share - pairs / (rows * columns * (full + partial))) < 0.01


def test_explain_says_bounds_as_they_are_written_and_only_what_differs():
    text = fg.compile(fg.Variant(head_dim=128, mask=GRID), target="sm80").explain()
    assert "k >= 32 * min(max(q // 32 - 3, 0), 25) and k <= 32 * min(max(q // 32 - 3, 0), 25) + 223 (" in text
    rejected = re.search(r"rejected, by their fields that differ:\n((?:    .*\n)+)", text)[1]
    own = set(re.search(r"  sm80 forward: (.*)", text)[1].split(", "))
    for line in rejected.splitlines():
        fields = line.strip().split(": ")[0]
        assert fields == "..." or (fields and not own & set(fields.split(", "))), line


def test_explain_says_what_the_emitted_names_stand_for():
    strength, first = torch.ones(4), 16
    variant = fg.Variant(head_dim=64, mask=lambda b, h, q, k: (k <= q) | (k < first), score=lambda s, b, h, q, k: s - strength[h] * (q - k) * 0.25)
    text = fg.compile(variant).explain()
    assert "In the emitted text capture_0 is float32 (4,), float_0 = 0.25, int_0 = 16." in text
    assert "In the emitted text" not in fg.compile(fg.Variant(head_dim=64, mask=fg.causal)).explain()


def test_explain_names_the_busiest_unit_of_a_hopper_tile():
    """Products of a tile of 192 x 64 at head dim 128 take 2 * 192 * 64 * 256 / 4096 clocks; tanh doubles the special functions, which bind at head dim 64."""
    q = torch.empty(1, 1, 4096, 128, dtype=torch.bfloat16).expand(1, 16, 4096, 128)
    plain = fg.compile(fg.Variant(mask=fg.causal), target="sm90a").explain(q, q, q)
    assert "tile of 192 x 64: matrix 1536, shared-memory port 1408, special functions 768" in plain and "Busiest: matrix" in plain
    capped = fg.compile(fg.Variant(mask=fg.causal, score=fg.softcap(30.0)), target="sm90a").explain(q[..., :64], q[..., :64], q[..., :64])
    assert "Busiest: special functions" in capped
    backward = fg.compile(fg.Variant(mask=fg.causal), target="sm90a").explain(q, q, q, which="backward")
    assert "additions to dQ" in backward and "What does not overlap" not in backward


def test_explain_says_when_a_chip_was_never_run():
    assert "compiles, never run" in fg.compile(fg.Variant(head_dim=64), target="sm100").explain()


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("name", ["sm80", "sm90a"])
def test_tiles_divide_explicit_blocks(name, which):
    blocks = fg.block_sparse(torch.ones(8, 8, dtype=torch.bool), 128)
    facts, problem = analyze(fg.Variant(mask=blocks).plain.form), Problem("bfloat16", 128, 128, which=which)
    chosen = plan(facts, problem, targets.parse(name), "sm80")
    assert facts.block == 128 and 128 % chosen.block_q == 0 == 128 % chosen.block_kv
    assert met(128, 48) == pytest.approx(1.25) and met(128, 64) == pytest.approx(1) and met(0, 48) == 1
    assert met(64, 128) == pytest.approx(1.9) and met(64, 96) > met(64, 64) == pytest.approx(1)


@pytest.mark.parametrize("forced", [{"block_q": 0}, {"block_q": 17}, {"block_kv": -16}])
def test_forced_tiles_of_no_whole_vectors_are_refused(forced):
    q = torch.zeros(1, 1, 64, 32)
    with pytest.raises(fg.VariantError, match="tile"):
        fg.compile(fg.Variant(), plan=forced).build(q, q, q)


def test_explain_counts_a_packed_decoding_step_once():
    q, k = torch.zeros(1, 32, 1, 64), torch.zeros(1, 4, 4096, 64)
    compulsory = 4 * (2 * q.numel() + 2 * k.numel())
    assert fg.compile(fg.Variant(), target="cpu").traffic(q, k, k).plan_bytes < 2 * compulsory


def test_packed_sequences_are_predicted_with_their_own_lengths():
    kernel, lengths = fg.compile(fg.Variant(mask=fg.causal), target="sm90a"), [1024, 128, 0, 128]
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    rows = [torch.empty(sum(lengths), heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    call = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    alone = [kernel.traffic(*(torch.empty(1, heads, n, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))).flops for n in lengths if n]
    assert kernel.traffic(*rows, **call).flops == sum(alone)
    text = kernel.explain(*rows, **call)
    assert "packed sequences: 2 of 128/128, 1 of 1024/1024" in text and "Family: sm90." in text
    text = kernel.explain(*rows, **call, dropout_p=0.1)
    assert "Family: sm90." in text and "Busiest: issue slots" in text  # which draw the bits
