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
    if family and case["kind"] == "varlen":
        pytest.skip("packed sequences are sm80's anyway")
    assert not judge.fault_problems(case, device="cuda", family=family)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s["id"])
def test_scenario(scenario, family):
    scenario["run"](functools.partial(judge.attention, family=family), "cuda")
