"""Are packed sequences beyond what the Hopper kernels can count refused by flashgen's own errors, and bounds on their tiles right?"""

from __future__ import annotations

import random

import pytest

import flashgen as fg
from flashgen import tensor_map
from flashgen.families import Sizes, TensorMap
from flashgen.families.common import ceil_div, most_tiles


@pytest.mark.parametrize("tile", [64, 128, 192])
def test_no_sequences_have_more_tiles_than_the_bound(tile):
    draw = random.Random(tile)
    for _ in range(200):
        lengths = [draw.choice((0, 1, 2, tile - 1, tile, tile + 1, draw.randrange(2000))) for _ in range(draw.randrange(30))]
        assert sum(ceil_div(n, tile) for n in lengths) <= most_tiles(sum(lengths), len(lengths), tile, 1)
    assert most_tiles(7 * tile, 7, tile, 1) <= 14 and most_tiles(5, 1000, tile, 1) == 5


def test_more_tiles_than_an_int32_are_refused():
    with pytest.raises(fg.ShapeError, match="the limit is 2\\^31"):
        most_tiles(2**27, 2**27, 128, 16)


def test_more_rows_than_a_tensor_map_counts_are_refused():
    record = TensorMap("map_q", "q", 64, 64, 128, packed=True)
    sizes = Sizes(batch=1, heads=1, kv_heads=1, q_len=2**30 + 1, kv_len=1, total_q=2**30 + 1, total_k=1)
    with pytest.raises(fg.ShapeError, match="the limit is 2\\^30"):
        tensor_map.encoder(record, "bfloat16", {"q_stride_l": 64, "q_stride_h": 64, "q_stride_b": 0}, sizes)
