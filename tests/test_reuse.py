"""Few kernels serve all lengths and numbers of a variant: three size classes a pass."""

import pytest
import torch

import flashgen

LENGTHS = [1, 2, 3, 5, 8, 9, 17, 33, 64, 65, 100, 127, 128, 129, 255, 300, 511, 640, 777, 1000, 1023, 1500, 2047, 2500, 3000, 4096, 5000, 6001, 7777, 8192]
LENGTHS += [8193, 9000, 10001, 11111, 12288, 14000, 15999, 16384, 17000, 20000, 24000, 28001, 32768, 40000, 50000, 65536, 70001, 90000, 100000, 131072]


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("target", ["sm90a", "sm80"])
def test_fifty_lengths_and_windows_take_at_most_four_kernels_a_pass(target, which):
    assert len(LENGTHS) == 50
    texts = set()
    for number, length in enumerate(LENGTHS):
        variant = flashgen.Variant(mask=flashgen.causal & flashgen.sliding_window(16 + 37 * number, 0), score=flashgen.softcap(20.0 + number))
        tensor = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16).expand(1, 4, length, 64)
        texts.add(flashgen.compile(variant, target=target).source(tensor, tensor, tensor, which=which))
    assert len(texts) <= 4
