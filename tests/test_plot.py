"""Do the pictures show what the masks are?"""

from __future__ import annotations

import matplotlib
import numpy as np
import pytest
import torch

import flashgen
from flashgen.bench import plots
from flashgen.plot import tile_classes

matplotlib.use("Agg")


def brute(mask, q_len: int, kv_len: int, block: int, head: int = 0) -> np.ndarray:
    """Classes from every element."""
    q, k = torch.arange(q_len)[:, None], torch.arange(kv_len)[None, :]
    dense = mask(torch.tensor(0), torch.tensor(head), q, k).broadcast_to(q_len, kv_len).numpy()
    parts = [[dense[i : i + block, j : j + block] for j in range(0, kv_len, block)] for i in range(0, q_len, block)]
    return np.array([[2 if part.all() else 1 if part.any() else 0 for part in row] for row in parts])


@pytest.mark.parametrize("shape", [(64, 64), (50, 75)])
def test_tiles_are_those_of_the_dense_mask(shape):
    def mask(b, h, q, k):
        return ((k <= q) & (q - k < 20)) | (k < 8 * h)

    for head in (0, 3):
        found = tile_classes(mask, *shape, block_q=8, block_kv=8, head=head)
        assert (found == brute(mask, *shape, 8, head)).all()


def test_text_has_a_row_per_tile_and_fits_a_terminal():
    assert flashgen.mask_text(flashgen.causal, 3, 3, block_q=1, block_kv=1) == "█··\n██·\n███"
    lines = flashgen.mask_text(flashgen.causal, 5000, 5000).splitlines()
    assert all(len(line) <= 64 for line in lines) and len(lines) <= 40
    assert set(flashgen.mask_text(flashgen.Variant(), 64, 64)) == {"█", "\n"}


def test_captured_tensors_and_inputs_are_read():
    documents = torch.tensor([0] * 8 + [1] * 8)
    assert flashgen.mask_text(flashgen.document(documents), 16, 16, block_q=8, block_kv=8) == "█·\n·█"
    table = flashgen.input("flags", ndim=1)
    mask = lambda b, h, q, k: table[k]  # noqa: E731
    assert flashgen.mask_text(mask, 2, 2, block_q=1, block_kv=1, inputs={"flags": torch.tensor([True, False])}) == "█·\n█·"


def test_plot_mask_is_a_figure_with_the_shares_in_its_title():
    figure = flashgen.plot_mask(flashgen.compile(flashgen.Variant(mask=flashgen.causal)), 512, 512)
    (axes,) = figure.axes
    assert axes.get_title() == "tiles of 128 x 128: 38% full, 25% partial, 38% empty"
    assert axes.get_ylim() == (512, 0), "queries run down"
    matplotlib.pyplot.close(figure)


def test_what_cannot_be_drawn_is_said():
    with pytest.raises(flashgen.ShapeError, match=r"limit of a picture.*larger block_q"):
        flashgen.plot_mask(flashgen.causal, 1 << 17, 1 << 17)
    with pytest.raises(flashgen.ShapeError, match="q_len=0"):
        flashgen.mask_text(flashgen.causal, 0, 4)
    with pytest.raises(flashgen.VariantError, match="not int"):
        flashgen.mask_text(3, 4, 4)


def test_bytes_over_length_grow_as_predicted():
    kernel = flashgen.compile(flashgen.Variant(mask=flashgen.causal), target="sm90a")
    figure = plots.bytes_over_length(kernel, [1024, 4096])
    lines = {line.get_label().split(",")[0]: line.get_ydata() for line in figure.axes[0].lines}
    assert lines["standard algorithm"][1] / lines["standard algorithm"][0] == pytest.approx(16, rel=0.1), "N squared"
    assert lines["compulsory"][1] / lines["compulsory"][0] == 4
    assert all(lines["this plan"] < lines["standard algorithm"]) and all(lines["this plan"] > lines["compulsory"])
    matplotlib.pyplot.close(figure)


def test_an_old_run_without_bytes_is_refused():
    with pytest.raises(flashgen.FlashgenError, match="measure again"):
        plots.roofline({"environment": {}, "rows": []})


@pytest.mark.parametrize(
    ("mask", "options", "message"),
    [
        (flashgen.document(torch.arange(4)), {}, "dimension 0 is 4"),
        (flashgen.causal, {"heads": 2, "head": 2}, "head=2"),
        (flashgen.causal, {"head": "a"}, "head='a'"),
        (flashgen.padding(torch.tensor([3, 5], dtype=torch.int32)), {"batch_index": 9}, "batch_index=9"),
        (flashgen.mask(lambda b, h, q, k: flashgen.input("t", ndim=1)[k] > 0), {}, "missing"),
    ],
)
def test_what_no_call_takes_is_not_drawn(mask, options, message):
    with pytest.raises(flashgen.FlashgenError, match=message):
        flashgen.mask_text(mask, 8, 8, **options)


def test_a_picture_needs_a_table_no_further_than_the_head_that_is_drawn():
    few = torch.tensor([4, 64])
    text = [flashgen.mask_text(lambda b, h, q, k: k < few[h], 8, 64, head=head, block_q=8, block_kv=8) for head in (0, 1)]
    assert text == ["▒·······", "████████"]
    with pytest.raises(flashgen.ShapeError, match="indexed by h and holds 2"):
        flashgen.mask_text(lambda b, h, q, k: k < few[h], 8, 64, head=2)
