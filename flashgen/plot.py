"""Plot: which tiles of a mask are full, partial and empty, as a matplotlib figure or as text.

Variant, lengths -> picture. Example: ``print(flashgen.mask_text(flashgen.causal, 512, 512))``. Tiles are classified as a kernel does it, by intervals:
a tile called partial is one for which "full" or "empty" was not proved.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from . import checks
from .capture import Capture, resolve
from .errors import FlashgenError, ShapeError, VariantError
from .plan import size_class
from .problem import Problem
from .traffic import FULL, PARTIAL, Shape, classifier
from .variant import Mask, Variant

MOST_TILES = 1 << 16
TEXT_COLUMNS = 64  # of mask_text, unless tile sizes are given
GLYPHS = "·▒█"  # empty, partial, full
COLOURS = ("#f2f2f2", "#f4a259", "#2a6f97")


def tile_classes(
    variant: Any, q_len: int, kv_len: int, *, block_q: int = 128, block_kv: int = 128, batch_index: int = 0, head: int = 0, heads: int = 16,
    inputs: dict[str, Any] | None = None,
) -> np.ndarray:  # fmt: skip
    """Classes of the tiles of one head, uint8 ``(ceil(q_len / block_q), ceil(kv_len / block_kv))``: 0 empty, 1 partial, 2 full.

    variant: a Variant, a Kernel, a mask of the catalogue or a mask function. heads: what the functions see as the number of heads. inputs: as in a call.
    """
    for name, value in (("q_len", q_len), ("kv_len", kv_len), ("block_q", block_q), ("block_kv", block_kv), ("heads", heads)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ShapeError(f"{name}={value!r}: a positive integer is wanted.")
    rows, columns = -(-q_len // block_q), -(-kv_len // block_kv)
    if rows * columns > MOST_TILES:
        raise ShapeError(f"{rows} x {columns} tiles: the limit of a picture is {MOST_TILES}. Choose a larger block_q and block_kv.")
    for name, value, limit in (("head", head, heads), ("batch_index", batch_index, 1 << 31)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < limit:
            raise ShapeError(f"{name}={value!r}: an integer from 0 to {limit - 1} is wanted.")
    chosen = _variant(variant)
    given = checks.given_inputs(chosen.inputs, inputs)
    numbers = chosen.trace(given)
    found = np.full((rows, columns), FULL, np.uint8)
    if numbers.form.mask < 0:
        return found
    tensors = [t.cpu() for t in resolve(numbers.captures, given, torch.device("cpu"))]
    batch = max((t.shape[d] for c, t in zip(numbers.captures, tensors) for d, n in enumerate(c.expect or ()) if n == "B"), default=batch_index + 1)
    checks.captures(numbers.captures, tensors, {"B": batch, "H": heads, "Q": q_len, "K": kv_len}, torch.device("cpu"))
    if batch_index >= batch:
        raise ShapeError(f"batch_index={batch_index}: the captured tensors hold {batch} items.")
    checks.spanned(numbers.spanned, tensors, {"B": batch_index + 1, "H": head + 1})  # what the picture reads
    numbers = numbers._replace(captures=tuple(map(Capture, tensors)))
    problem = Problem("bfloat16", 128, 128, size=size_class(q_len, kv_len))
    classify = classifier(numbers.form, problem, Shape(1, heads, heads, q_len, kv_len), numbers, batch_index, head)
    for i in range(rows):
        for j in range(columns):
            found[i, j] = classify((i * block_q, min((i + 1) * block_q, q_len) - 1), (j * block_kv, min((j + 1) * block_kv, kv_len) - 1))
    return found


def _variant(x: Any) -> Variant:
    x = getattr(x, "variant", x)
    if isinstance(x, Variant):
        return x
    if isinstance(x, Mask) or callable(x):
        return Variant(mask=x)
    raise VariantError(f"a Variant, Kernel, mask or mask function is wanted, not {type(x).__name__}.")


def mask_text(variant: Any, q_len: int, kv_len: int, *, block_q: int | None = None, block_kv: int | None = None, **options: Any) -> str:
    """The tiles as lines of text: ``█`` full, ``▒`` partial, ``·`` empty. Without sizes, tiles are as small as 64 columns allow, powers of two.

    ``options``: batch_index, head, heads, inputs, see ``plot_mask``.
    """
    if block_q is None or block_kv is None:
        size = 1
        while -(-kv_len // size) > TEXT_COLUMNS:
            size *= 2
        block_q, block_kv = block_q or 2 * size, block_kv or size  # a character is about twice as high as wide
    classes = tile_classes(variant, q_len, kv_len, block_q=block_q, block_kv=block_kv, **options)
    return "\n".join("".join(GLYPHS[kind] for kind in row) for row in classes)


def plot_mask(
    variant: Any, q_len: int, kv_len: int, *, block_q: int = 128, block_kv: int = 128, axes: Any = None, title: str | None = None, **options: Any
) -> Any:  # fmt: skip
    """A matplotlib Figure of the full, partial and empty tiles of one head; queries run down, keys to the right.

    variant: a Variant, a Kernel, a mask or a mask function. axes: draw there instead of into a new figure.
    ``options``: batch_index, head (which item and head is drawn), heads (their number, for functions that read it), inputs (tensors of ``flashgen.input``).
    """
    classes = tile_classes(variant, q_len, kv_len, block_q=block_q, block_kv=block_kv, **options)
    try:
        from matplotlib import colors, pyplot
    except ImportError as error:
        raise FlashgenError("plot_mask needs matplotlib: pip install matplotlib; flashgen.mask_text needs nothing.") from error
    if axes is None:
        _, axes = pyplot.subplots(figsize=(5.2, 4.6 * min(max(q_len / kv_len, 0.4), 2.0) + 0.6), layout="constrained")
    edges = [np.minimum(np.arange(n + 1) * block, length) for n, block, length in zip(classes.shape, (block_q, block_kv), (q_len, kv_len))]
    axes.pcolormesh(edges[1], edges[0], classes, cmap=colors.ListedColormap(COLOURS), vmin=0, vmax=2, edgecolors="white", linewidth=0.3)
    axes.set(xlabel="key", ylabel="query", xlim=(0, kv_len), ylim=(q_len, 0), aspect="equal")
    share = [float((classes == kind).mean()) for kind in range(3)]
    axes.set_title(title or f"tiles of {block_q} x {block_kv}: {share[FULL]:.0%} full, {share[PARTIAL]:.0%} partial, {share[0]:.0%} empty")
    patches = [pyplot.Rectangle((0, 0), 1, 1, facecolor=colour, edgecolor="grey") for colour in COLOURS]
    axes.legend(patches, ("empty: never loaded", "partial: mask applied", "full: no mask code"), loc="upper right", fontsize=8)
    return axes.figure
