"""Is every variant right on the GPU? The same cases as on the CPU, on the device that is there."""

from __future__ import annotations

import cases_faults
import cases_variants
import judge
import pytest
import torch

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("stretch", [1, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", cases_variants.CASES)
def test_variant(name, dtype, stretch):
    assert not judge.variant_problems(cases_variants.CASES[name], dtype=dtype, device="cuda", stretch=stretch)


@pytest.mark.parametrize("case", judge.fault_cases("cuda", 2e10), ids=lambda c: c["id"])
def test_fault(case):
    assert not judge.fault_problems(case, device="cuda")


@pytest.mark.parametrize(
    "scenario", [s for s in cases_faults.SYSTEM if s["needs"] in ("any", "cuda") and s["kind"] not in judge.AVAILABLE_LATER], ids=lambda s: s["id"]
)
def test_scenario(scenario):
    scenario["run"](judge.attention, "cuda")
