"""Does every emitted CUDA kernel compile for every architecture, without a GPU, spilling nothing and using the shared memory it planned?"""

from __future__ import annotations

import pytest
import torch

import flashgen as fg
from flashgen import target as targets

GPUS = [name for name in targets.NAMES if name != "cpu"]


def _tensors(dim, dtype=torch.bfloat16, q_len=2048, grad=True):
    return [torch.empty(1, h, q_len, dim, dtype=dtype, requires_grad=grad) for h in (4, 2, 2)]


def variants():
    table, ids = torch.zeros(4, 257, requires_grad=True), torch.zeros(2048, dtype=torch.int32)
    return {
        "plain": fg.Variant(),
        "causal": fg.Variant(mask=fg.causal),
        "softcap and window": fg.Variant(mask=fg.causal & fg.sliding_window(1023, 0), score=fg.softcap(30.0)),
        "alibi and documents": fg.Variant(mask=fg.causal & fg.document(ids), score=fg.alibi()),
        "learned table and sink": fg.Variant(score=fg.relative_bias(table), sink=True),
        "distance mask": fg.Variant(mask=lambda b, h, q, k: (k <= q) & (q - k <= 200), score=lambda s, b, h, q, k: s - 0.5 * (q - k)),
        "user function": fg.Variant(
            mask=lambda b, h, q, k: (q // 64 == k // 64) | (k < 4), score=lambda s, b, h, q, k: s * torch.sigmoid(s) - 0.01 * (q - k).abs()
        ),
    }


def _build(variant, target, dim, which, dtype=torch.bfloat16):
    call = {"sink": torch.zeros(4)} if variant.sink else {}
    return fg.compile(variant, target=target).build(*_tensors(dim, dtype), which=which, **call)


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_compiles_for_every_architecture(target, which):
    binary = _build(variants()["softcap and window"], target, 64, which)
    assert binary.kind == "cubin" and binary.data[:4] == b"\x7fELF"
    assert not binary.report.faults, binary.report.faults


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("name", variants())
def test_variants_compile_clean(name, which):
    assert not _build(variants()[name], "sm90a", 128, which).report.faults


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("dim", [16, 40, 96, 192, 256])
def test_head_dims_compile_clean(dim, which):
    assert not _build(variants()["causal"], "sm80", dim, which, torch.float16).report.faults


@pytest.mark.parametrize("target", ["sm80", "sm90a"])
@pytest.mark.parametrize("dim", [64, 192])
def test_the_deterministic_backward_compiles_clean(dim, target):
    variant, tensors = variants()["softcap and window"], _tensors(dim)
    assert not fg.compile(variant, target=target, deterministic=True).build(*tensors, which="backward").report.faults


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [16, 64, 96, 192, 256])
def test_hopper_backward_compiles_clean(dim, deterministic):
    kernel = fg.compile(variants()["causal"], target="sm90a", family="sm90", deterministic=deterministic)
    assert not kernel.build(*_tensors(dim), which="backward").report.faults
