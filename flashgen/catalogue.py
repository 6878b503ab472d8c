"""The catalogue of masks and scores (api.md): each is a Mask or Score made of the same language a user writes.

Example: ``causal & sliding_window(left=1023, right=0)``, ``softcap(30.0) >> alibi()``. off = kv_len - q_len aligns both ends at the bottom right.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

from . import language as lang
from .errors import DtypeError, ShapeError, VariantError
from .variant import Mask, Score

_offset = lang.kv_len - lang.q_len
_BROADCAST = ("B", "H", "Q", "K")


def _tensor(x: Any, what: str, ndims: tuple[int, ...], kinds: tuple[str, ...] | None = None) -> Any:
    """Check a captured tensor of the catalogue when it is given; Inputs are checked when their tensor comes."""
    if isinstance(x, lang.Input):
        return x
    if not lang.is_tensor(x):
        raise VariantError(f"{what}: a torch tensor (or flashgen.input) is wanted, not {type(x).__name__}.")
    if x.dim() not in ndims:
        raise ShapeError(f"{what}: a tensor of {' or '.join(map(str, ndims))} dimension(s) is wanted, got shape {tuple(x.shape)}.")
    name = lang.dtype_name(x.dtype)
    if kinds and lang.STORAGE.get(name) not in kinds:
        raise DtypeError(f"{what}: dtype {name} is not supported; wanted is {' or '.join(kinds)}.")
    return x


def _integer(x: Any, what: str, least: int) -> int:
    if isinstance(x, bool) or not isinstance(x, numbers.Integral) or int(x) < least:
        raise VariantError(f"{what}={x!r}: an integer of at least {least} is wanted.")
    return int(x)


def _real(x: Any, what: str) -> float:
    try:
        if not isinstance(x, bool) and isinstance(x, numbers.Real) and math.isfinite(float(x)):
            return float(x)
    except OverflowError:  # an integer beyond any float
        pass
    raise VariantError(f"{what}={x!r}: a finite number is wanted.")


def _broadcast_load(tensor: Any, indices: tuple, *, block: int | None = None) -> Any:
    """Load from a tensor whose dimensions, right-aligned to (B, Hq, Lq, Lk), are 1 or full; with ``block``, an entry stands for so many rows or keys."""
    captured = lang.as_captured(tensor)
    ndim = captured.capture.ndim
    shape = captured.capture.shape or (2,) * ndim
    full = _BROADCAST[4 - ndim :]
    units = {} if block is None else {"Q": f"Q/{block}", "K": f"K/{block}"}
    expected = tuple(1 if n == 1 else units.get(name, name) for n, name in zip(shape, full))
    if captured.capture.expect not in (None, expected):
        raise VariantError("one tensor stands for two shapes of masks or scores (another block_size, say): give each a tensor of its own, tensor.clone().")
    captured.capture.expect = expected
    return captured[tuple(0 if n == 1 else i for n, i in zip(shape, indices[4 - ndim :]))] if ndim else captured.scalar()


causal = Mask(lambda b, h, q, k: k <= q + _offset, "causal")
causal_top_left = Mask(lambda b, h, q, k: k <= q, "causal_top_left")


def sliding_window(left: int = -1, right: int = -1) -> Mask:
    """q + off - left <= k <= q + off + right, both ends inclusive; -1 leaves an end open. The sizes are run-time values."""
    left, right = _integer(left, "sliding_window(left)", -1), _integer(right, "sliding_window(right)", -1)
    left, right = (-1 if n >= 2**31 else n for n in (left, right))  # wider than any length

    def window(b: Any, h: Any, q: Any, k: Any) -> Any:
        low = k >= q + _offset - left if left >= 0 else True
        high = k <= q + _offset + right if right >= 0 else True
        return lang.logical_and(low, high) if left >= 0 and right >= 0 else (low if left >= 0 else high)

    return Mask(window, f"sliding_window({left}, {right})")


def prefix_lm(length: Any) -> Mask:
    """(k < length) | causal; length: int, or an integer tensor ``(B,)``."""
    if not isinstance(length, numbers.Integral):
        _tensor(length, "prefix_lm(length)", (1,), ("int", "long"))
        return Mask(lambda b, h, q, k: (k < lang.as_captured(length, ("B",))[b]) | (k <= q + _offset), "prefix_lm")
    bound = _integer(length, "prefix_lm(length)", 0)
    return Mask(lambda b, h, q, k: (k < bound) | (k <= q + _offset), f"prefix_lm({bound})")


def document(ids: Any, kv_ids: Any = None) -> Mask:
    """ids[q] == kv_ids[k]; ids ``(L,)`` or ``(B, L)`` integers, kv_ids defaults to ids."""
    _tensor(ids, "document(ids)", (1, 2), ("int", "long"))
    if kv_ids is not None:
        _tensor(kv_ids, "document(kv_ids)", (1, 2), ("int", "long"))

    def load(t: Any, b: Any, i: Any, length: str) -> Any:
        two = (t.ndim if isinstance(t, lang.Input) else t.dim()) == 2
        captured = lang.as_captured(t, ("B", length) if two else (length,))
        return captured[b, i] if two else captured[i]

    other = ids if kv_ids is None else kv_ids
    both = "QK" if kv_ids is None else "Q"
    return Mask(lambda b, h, q, k: load(ids, b, q, both) == load(other, b, k, "K" if kv_ids is not None else both), "document")


def chunked(size: int) -> Mask:
    """(q + off) // size == k // size. The size is static."""
    size = _integer(size, "chunked(size)", 1)
    return Mask(lambda b, h, q, k: (q + _offset) // size == k // size, f"chunked({size})")


def dilated(step: int) -> Mask:
    """(q + off - k) % step == 0. The step is static."""
    step = _integer(step, "dilated(step)", 1)
    return Mask(lambda b, h, q, k: (q + _offset - k) % step == 0, f"dilated({step})")


def padding(lengths: Any) -> Mask:
    """k < lengths[b]; lengths: integer tensor ``(B,)``. Alignment stays that of the full kv_len."""
    _tensor(lengths, "padding(lengths)", (1,), ("int", "long"))
    return Mask(lambda b, h, q, k: k < lang.as_captured(lengths, ("B",))[b], "padding")


def global_tokens(flags: Any) -> Mask:
    """flags[q] | flags[k]; flags: bool tensor ``(L,)`` with L at least q_len and kv_len."""
    _tensor(flags, "global_tokens(flags)", (1,), ("bool", "int", "long"))
    load = lambda i: lang.to(lang.as_captured(flags, ("QK",))[i], "bool")  # noqa: E731
    return Mask(lambda b, h, q, k: load(q) | load(k), "global_tokens")


def neighborhood(shape: Sequence[int], window: Any, dilation: Any = 1) -> Mask:
    """NATTEN's neighborhood over a grid ``shape`` (last axis fastest): the centre is clamped into the grid, so each query sees prod(window) keys.

    window and dilation: an int or one per axis; window <= shape / dilation. With dilation, neighbours share the query's residue class
    (Hassani et al. 2023, "Dilated Neighborhood Attention Transformer").
    """

    def per_axis(x: Any, what: str, axes: int) -> tuple:
        values = x if isinstance(x, (tuple, list)) else (x,) * axes
        if not values:
            raise VariantError(f"{what}={x!r}: a grid of at least one axis is wanted.")
        return tuple(_integer(n, what, 1) for n in values)

    grid = per_axis(shape, "neighborhood(shape)", 1)
    windows, dilations = per_axis(window, "neighborhood(window)", len(grid)), per_axis(dilation, "neighborhood(dilation)", len(grid))
    if len(windows) != len(grid) or len(dilations) != len(grid):
        raise VariantError(f"neighborhood: shape has {len(grid)} axes, window {len(windows)}, dilation {len(dilations)}; give one value or one per axis.")
    for n, w, d in zip(grid, windows, dilations):
        if w * d > n:
            raise VariantError(f"neighborhood: window {w} * dilation {d} does not fit an axis of {n}.")

    def coordinates(i: Any) -> list:
        out = []
        for axis in range(len(grid)):
            inner = math.prod(grid[axis + 1 :])
            c = i // inner if inner > 1 else i
            out.append(c % grid[axis] if axis else c)
        return out

    def visible(b: Any, h: Any, q: Any, k: Any) -> Any:
        result: Any = None
        for cq, ck, n, w, d in zip(coordinates(q), coordinates(k), grid, windows, dilations):
            group, residue = (cq // d, cq % d) if d > 1 else (cq, 0)
            # number of grid positions of this residue class along the axis; n // d or one more
            count = (n - 1 - residue) // d + 1 if d > 1 else n
            start = lang.clamp(group - w // 2, 0, count - w) if d == 1 else lang.minimum(lang.maximum(group - w // 2, 0), count - w)
            place = ck // d if d > 1 else ck
            near = (place >= start) & (place < start + w)
            if d > 1:
                near = near & (ck % d == residue)
            result = near if result is None else result & near
        return result

    return Mask(visible, f"neighborhood({grid}, {windows}, {dilations})")


def block_sparse(blocks: Any, block_size: int) -> Mask:
    """blocks[b, h, q // block_size, k // block_size]; bool, broadcastable to ``(B, Hq, ceil(Lq / bs), ceil(Lk / bs))``."""
    size = _integer(block_size, "block_sparse(block_size)", 1)
    _tensor(blocks, "block_sparse(blocks)", (0, 1, 2, 3, 4), ("bool",))

    def visible(b: Any, h: Any, q: Any, k: Any) -> Any:
        return _broadcast_load(blocks, (b, h, q // size, k // size), block=size)

    return Mask(visible, f"block_sparse({size})")


def butterfly(blocks: int, *, stride: int | None = None, device: Any = None) -> Any:
    """Blocks of the flat butterfly, for ``block_sparse``: bool ``(blocks, blocks)``, block (i, j) present iff i == j or i ^ j is a power of two
    below ``stride`` (None: all of them). 1 + log2(stride) blocks a row.

    The sum of butterfly factors up to the stride (Chen et al. 2022, "Pixelated Butterfly", section 3.2), which block-sparse FlashAttention uses
    (Dao et al. 2022, section 3.3). Example: ``block_sparse(butterfly(64), 128) & causal`` for a length of 8192.
    """
    import torch

    n, limit = _integer(blocks, "butterfly(blocks)", 0), None if stride is None else _integer(stride, "butterfly(stride)", 1)
    place = torch.arange(n, device=device)
    apart = place[:, None] ^ place
    present = (apart & (apart - 1)) == 0  # zero too
    return present if limit is None else present & (apart < limit)


def local_global(blocks: int, *, window: int = 1, first: int = 1, device: Any = None) -> Any:
    """Blocks of a local and global pattern, for ``block_sparse``: bool ``(blocks, blocks)``, block (i, j) present iff |i - j| <= window,
    or i or j is among the ``first`` blocks, which see and are seen by all.

    Sparse Transformer, Longformer and BigBird without its random blocks (Beltagy et al. 2020; Zaheer et al. 2020); the second pattern that block-sparse
    FlashAttention names. Example: ``block_sparse(local_global(64, window=2), 128)``.
    """
    import torch

    n, reach = _integer(blocks, "local_global(blocks)", 0), _integer(window, "local_global(window)", 0)
    chosen = torch.arange(n, device=device) < _integer(first, "local_global(first)", 0)
    place = torch.arange(n, device=device)
    return ((place[:, None] - place).abs() <= reach) | chosen[:, None] | chosen


def from_dense(mask: Any) -> Mask:
    """A bool tensor broadcastable to ``(B, Hq, Lq, Lk)``, True = visible. Any other dtype is a DtypeError: pass additive masks as ``bias``."""
    if lang.is_tensor(mask) and lang.dtype_name(mask.dtype) != "bool":
        name = lang.dtype_name(mask.dtype)
        raise DtypeError(f"from_dense: the mask has dtype {name}; it must be bool (True = visible). Pass an additive mask as score=flashgen.bias(tensor).")
    _tensor(mask, "from_dense(mask)", (0, 1, 2, 3, 4))
    return Mask(lambda b, h, q, k: lang.to(_broadcast_load(mask, (b, h, q, k)), "bool"), "from_dense")


def softcap(cap: float) -> Score:
    """cap * tanh(s / cap) (Gemma 2)."""
    cap = _real(cap, "softcap(cap)")
    if cap <= 0:
        raise VariantError(f"softcap(cap={cap}): a positive number is wanted; leave the score out for no cap.")
    return Score(lambda s, b, h, q, k: cap * lang.FUNCTIONS["tanh"](s / cap), f"softcap({cap})")


def _paper_slope(h: Any) -> Any:
    """ALiBi's slopes (Press et al. 2022), also for a head count that is no power of two: the geometric sequence of the power of two
    below it, then every other term of the next one's."""
    below: Any = lang.const(1)
    for n in range(1, 13):
        below = lang.where(lang.heads >= lang.const(2**n), lang.const(2**n), below)
    one, two = lang.const(1), lang.const(2)
    real = lambda x: lang.cast(x, lang.REAL)  # noqa: E731 - in the precision of the scores: a float64 call has float64 slopes
    first = lang.FUNCTIONS["exp2"](lang.const(-8.0) * real(h + one) / real(below))
    rest = lang.FUNCTIONS["exp2"](lang.const(-4.0) * real(two * (h - below) + one) / real(below))
    return lang.where(h < below, first, rest)


def alibi(slopes: Any = None) -> Score:
    """s - slope * |q + off - k|; slopes ``(Hq,)`` or ``(B, Hq)``, None = the paper's for any number of heads."""
    if slopes is not None:
        _tensor(slopes, "alibi(slopes)", (1, 2), ("real",))

    def slope(b: Any, h: Any) -> Any:
        if slopes is None:
            return _paper_slope(h)
        two = (slopes.ndim if isinstance(slopes, lang.Input) else slopes.dim()) == 2
        captured = lang.as_captured(slopes, ("B", "H") if two else ("H",))
        return captured[b, h] if two else captured[h]

    return Score(lambda s, b, h, q, k: s - slope(b, h) * lang.absolute(q + _offset - k), "alibi")


def bias(tensor: Any) -> Score:
    """s + tensor, broadcastable to ``(B, Hq, Lq, Lk)``, floating; an entry of -inf masks. Differentiable."""
    if lang.is_tensor(tensor) and lang.STORAGE.get(lang.dtype_name(tensor.dtype)) != lang.REAL:
        raise DtypeError(f"bias: dtype {lang.dtype_name(tensor.dtype)}; it must be floating. Pass a boolean mask as mask=flashgen.from_dense(tensor).")
    _tensor(tensor, "bias(tensor)", (0, 1, 2, 3, 4), ("real",))

    add = lambda s, b, h, q, k: s + _broadcast_load(tensor, (b, h, q, k))  # noqa: E731
    return Score(add, "bias", Mask(lambda b, h, q, k: _broadcast_load(tensor, (b, h, q, k)) != -math.inf, "bias > -inf"))


def relative_bias(table: Any) -> Score:
    """s + table[..., clamp(q + off - k, -R, R) + R]; table ``(2R+1,)`` or ``(Hq, 2R+1)``, floating. Differentiable."""
    _tensor(table, "relative_bias(table)", (1, 2), ("real",))
    if lang.is_tensor(table) and table.shape[-1] % 2 == 0:
        raise ShapeError(f"relative_bias(table): the last dimension is 2R + 1, an odd number; got {table.shape[-1]}.")

    def add(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        captured = lang.as_captured(table)
        two = captured.capture.ndim == 2
        captured.capture.expect = ("H", None) if two else (None,)
        size = captured.capture.sizes()[-1]
        if size % 2 == 0:
            raise ShapeError(f"relative_bias(table): the last dimension is 2R + 1, an odd number; got {size}.")
        radius = size // 2
        place = lang.clamp(q + _offset - k, -radius, radius) + radius
        return s + (captured[h, place] if two else captured[place])

    return Score(add, "relative_bias")


def t5_bias(table: Any, bidirectional: bool = True, max_distance: int = 128) -> Score:
    """s + table[bucket(k - q - off), h]; table ``(buckets, Hq)``, floating (Raffel et al. 2020, relative position buckets). Differentiable.

    Half of the buckets are exact distances, the rest grow logarithmically up to max_distance; bidirectional spends half on keys after the query.
    """
    _tensor(table, "t5_bias(table)", (2,), ("real",))
    max_distance = _integer(max_distance, "t5_bias(max_distance)", 1)

    def add(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        captured = lang.as_captured(table, (None, "H"))
        buckets = captured.capture.sizes()[0]
        one_side = buckets // 2 if bidirectional else buckets
        exact = one_side // 2
        if exact < 1 or max_distance <= exact:
            raise VariantError(f"t5_bias: {buckets} buckets with max_distance={max_distance}: max_distance must exceed the {exact} exact distances.")
        relative = k - (q + _offset)
        distance = lang.absolute(relative) if bidirectional else lang.maximum(-relative, 0)
        # the logarithm's integer steps are counted on the host, so that no rounding of log moves a boundary
        bucket = lang.minimum(distance, exact)
        for start in _t5_starts(one_side, exact, max_distance):
            bucket = bucket + lang.to(distance >= start, "int32")
        if bidirectional:
            bucket = bucket + lang.where(relative > 0, one_side, 0)
        return s + captured[bucket, h]

    return Score(add, "t5_bias")


def _t5_starts(one_side: int, exact: int, max_distance: int) -> list[int]:
    """Smallest distance of each logarithmic bucket after the first, by the published float32 formula."""
    import numpy as np

    d = np.arange(exact, max_distance + 1, dtype=np.float32)
    scaled = np.log(d / np.float32(exact)) / math.log(max_distance / exact) * (one_side - exact)
    bucket = np.minimum(exact + scaled.astype(np.int64), one_side - 1)
    return [int(exact + i) for i in range(1, len(d)) for _ in range(int(bucket[i] - bucket[i - 1]))]
