"""Are the captured tensors found whose gradient is a sum along q - k, and no others?"""

from __future__ import annotations

import pytest
import torch

import flashgen
from flashgen import diagonals

TABLE, NUMBERS = torch.zeros(2, 9, requires_grad=True), torch.zeros(2, requires_grad=True)
PER_KEY, TWO = torch.zeros(64, requires_grad=True), torch.zeros(64, 64, requires_grad=True)


def _slots(function) -> tuple[int, ...]:
    return diagonals.slots(flashgen.Variant(mask=flashgen.causal, score=function).trace({}).form)


@pytest.mark.parametrize(
    "function",
    [
        flashgen.relative_bias(TABLE),
        flashgen.t5_bias(torch.zeros(32, 2, requires_grad=True)),
        lambda s, b, h, q, k: s - NUMBERS[h] * (q - k).abs(),
        lambda s, b, h, q, k: s + TABLE[h, torch.clamp((q + 3) - (k - b), 0, 8)],
        lambda s, b, h, q, k: s + TABLE[h, torch.clamp(-k + q, 0, 8)] * NUMBERS[h].exp(),
    ],
)
def test_along_diagonals(function):
    assert 0 in _slots(function)


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, q, k: s + PER_KEY[k],
        lambda s, b, h, q, k: s + TWO[q, k],
        lambda s, b, h, q, k: s + TABLE[h, torch.clamp(q + k, 0, 8)],
        lambda s, b, h, q, k: s + TABLE[h, torch.clamp(2 * q - k, 0, 8)],
        lambda s, b, h, q, k: s + TABLE[h, torch.clamp(q - k, 0, 8)] * q,
        lambda s, b, h, q, k: s * NUMBERS[h],
        lambda s, b, h, q, k: torch.tanh(s + TABLE[h, torch.clamp(q - k, 0, 8)]),
        lambda s, b, h, q, k: s + NUMBERS[h] + NUMBERS[k % 2],  # one load is, the other is not
        lambda s, b, h, q, k: s,
    ],
)
def test_not_along_diagonals(function):
    assert _slots(function) == ()
