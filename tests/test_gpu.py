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

import flashgen

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
    return flashgen.compile(flashgen.Variant(mask=flashgen.causal, **variant), family=family, deterministic=deterministic), q, k, v


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
    kernel, q, k, v = _causal(family, length=777, deterministic=True, score=flashgen.softcap(20.0))
    dout, seen = torch.randn_like(q), []
    for _ in range(20):
        out, aux = kernel(q, k, v, return_aux=True)
        seen.append((out, aux.lse, *torch.autograd.grad(out, (q, k, v), dout)))
    assert all(torch.equal(a, b) for later in seen[1:] for a, b in zip(seen[0], later))
