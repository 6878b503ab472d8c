"""Is every variant right on the CPU, forward, statistics and gradients, in every dtype?"""

from __future__ import annotations

import cases_faults
import cases_variants
import judge
import pytest
import torch

PASSES = [(torch.float64, 1), (torch.float32, 5), (torch.bfloat16, 1)]


@pytest.mark.parametrize("name", cases_variants.CASES)
def test_variant(name):
    """One test per variant, so that a worker builds its kernels once."""
    problems = {
        f"{dtype} x{stretch}": judge.variant_problems(cases_variants.CASES[name], dtype=dtype, device="cpu", stretch=stretch) for dtype, stretch in PASSES
    }
    assert not any(problems.values()), problems


@pytest.mark.parametrize("name", ["identity", "softcap", "m_causal", "m_document", "learn_bias_qk", "m_causal_odd_head_dim"])
def test_variant_in_float16(name):
    assert not judge.variant_problems(cases_variants.CASES[name], dtype=torch.float16, device="cpu")


@pytest.mark.parametrize("name", ["softcap_causal_gqa", "m_sliding_window", "m_document_causal_local", "learn_rel_abs_table", "m_natten2d_tiled", "alibi"])
def test_variant_in_bfloat16_over_several_tiles(name):
    assert not judge.variant_problems(cases_variants.CASES[name], dtype=torch.bfloat16, device="cpu", stretch=5)


@pytest.mark.parametrize("case", judge.fault_cases("cpu", 1e9), ids=lambda c: c["id"])
def test_fault(case):
    assert not judge.fault_problems(case, device="cpu")


@pytest.mark.parametrize("scenario", [s for s in cases_faults.SYSTEM if s["needs"] == "any" and s["kind"] not in judge.AVAILABLE_LATER], ids=lambda s: s["id"])
def test_scenario(scenario):
    scenario["run"](judge.attention, "cpu")
