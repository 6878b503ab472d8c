"""Is everything that nobody sees passed over, and nothing else? Ranges with holes, explicit blocks, tables of bounds, and the three in compiled kernels.

A walk here is what a kernel does: step from range to range, drop the tiles that are classified empty. On the usual masks no tile is left that holds nothing.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import numpy as np
import probes
import pytest
import torch

import flashgen as fg
from flashgen import bounds, ranges, settings, tables
from flashgen.analysis import analyze
from flashgen.interval import Evaluator, NumberSpans, tile_truth
from flashgen.reference import reference

L = 192
G = torch.Generator().manual_seed(3)
IDS = torch.randint(0, 9, (L + 5,), generator=G, dtype=torch.int32).sort().values
STARTS = torch.tensor([int((n > IDS).sum()) for n in range(10)], dtype=torch.int32)
FLAGS = torch.zeros(L, dtype=torch.bool)
FLAGS[[0, 1, 90]] = True
FIRST = fg.mask(lambda b, h, q, k: k < 3)
DENSE = torch.zeros(1, 1, L, L, dtype=torch.bool)
DENSE[..., 40:70, 100:110], DENSE[..., 150:, :20], DENSE[..., :10, :10] = True, True, True

# masks with holes between closed-form ranges: (mask, most ranges of a tile of rows, of a tile of keys)
HOLES = {
    "sink and window": (fg.causal & (fg.sliding_window(20, 0) | FIRST), 2, 2),
    "prefix and window": (fg.mask(lambda b, h, q, k: k < 30) | (fg.causal & fg.sliding_window(20, 0)), 2, 1),
    "two windows": (lambda b, h, q, k: ((q - k >= 0) & (q - k < 10)) | ((q - k > 80) & (q - k < 100)), 2, 2),
    "outside a window": (lambda b, h, q, k: (q - k).abs() >= 50, 2, 2),
    "another chunk": (~fg.chunked(40), 2, 2),
    "block diffusion": (
        lambda b, h, q, k: ((q // 16 == k // 16) & (q < 96) & (k < 96)) | ((q // 16 > (k - 96) // 16) & (k >= 96) & (q < 96))
        | (((q - 96) // 16 >= (k - 96) // 16) & (k >= 96) & (q >= 96)), 3, 3,
    ),
    "kinds of heads": (lambda b, h, q, k: ((h == 0) | (q - k < 30)) & (k <= q), 2, 2),
}  # fmt: skip
# masks whose holes are found by the classes of tiles or along explicit blocks
OTHERS = {
    "causal": fg.causal, "window": fg.causal & fg.sliding_window(31, 0), "prefix": fg.prefix_lm(50), "chunked": fg.chunked(32),
    "chunked causal": fg.chunked(50) & fg.causal,
    "dilated": fg.dilated(4), "widely dilated": fg.dilated(60) & fg.causal, "dilated window": fg.dilated(4) & fg.causal & fg.sliding_window(60, 0),
    "document": fg.document(IDS), "causal document": fg.document(IDS) & fg.causal, "starts": lambda b, h, q, k: (k >= STARTS[IDS[q]]) & (k <= q),
    "global": fg.sliding_window(9, 9) | fg.global_tokens(FLAGS), "butterfly": fg.block_sparse(fg.butterfly(12), 16),
    "local and global": fg.causal & fg.block_sparse(fg.local_global(12), 16), "blocks of 24": fg.block_sparse(fg.butterfly(8), 24),
    "dense": fg.from_dense(DENSE),
    "neighborhood": fg.neighborhood((12, 16), (3, 5)), "padding": fg.padding(torch.tensor([77], dtype=torch.int32)) & fg.causal,
}  # fmt: skip
MASKS = {name: mask for name, (mask, *_) in HOLES.items()} | OTHERS
TILES = [(32, 16), (16, 32), (48, 24)]


class Walk:
    """The tiles of one row of tiles that a kernel meets: inside the ranges (``met``), and not empty by their class (``visited``)."""

    def __init__(self, mask, axis):
        self.traced = probes.trace(mask=mask)
        self.form, self.axis = self.traced.form, axis
        self.arrays = [t.detach().numpy() for t in probes.replayed(self.traced)]
        self.parts = ranges.several(ranges.axis_bounds(self.form, axis))

    def spans(self, **leaves):
        whole = {"b": (0, 0), "h": (1, 1), "q": (0, L - 1), "k": (0, L - 1), "q_len": (L, L), "kv_len": (L, L), "heads": (2, 2)}
        return NumberSpans(whole | leaves, self.arrays, self.traced.floats, self.traced.ints)

    def tiles(self, own, size):
        """own: (first, last) of the other axis."""
        other = "q" if self.axis == "k" else "k"
        spans = self.spans(**{other: own})
        found = [ranges.axis_span(p, Evaluator(self.form, spans), spans) for p in self.parts]
        met, visited = [], []
        for first in range(0, L, size):
            last = min(first + size, L) - 1
            if any(lo <= last and first <= hi and lo <= hi for lo, hi in found):
                met.append(first)
                if tile_truth(self.form, self.spans(**{other: own, self.axis: (first, last)}))[1]:
                    visited.append(first)
        return met, visited


@pytest.mark.parametrize("axis", "kq")
@pytest.mark.parametrize("name", MASKS)
def test_no_empty_tile_is_visited_and_no_needed_one_skipped(name, axis):
    walk = Walk(MASKS[name], axis)
    table = probes.table(MASKS[name], L, L, heads=2)[0, 1]
    table = table if axis == "k" else table.T
    for size_q, size_k in [(16, 16), (8, 32)] if name == "dense" else TILES:  # without a table few entries are read
        own_size, size = (size_q, size_k) if axis == "k" else (size_k, size_q)
        for first in range(0, L, own_size):
            own = (first, min(first + own_size, L) - 1)
            needed = [n for n in range(0, L, size) if table[first : own[1] + 1, n : n + size].any()]
            met, visited = walk.tiles(own, size)
            assert visited == needed, f"tiles of {size} that rows {own} see"
            if name in HOLES:
                assert met == needed, f"ranges of {own}"


@pytest.mark.parametrize("name", HOLES)
def test_holes_are_closed_forms(name):
    mask, *most = HOLES[name]
    for axis, n in zip("kq", most):
        parts = ranges.several(ranges.axis_bounds(probes.trace(mask=mask).form, axis))
        assert len(parts) == n, (axis, parts)


def test_ranges_open_on_one_side_are_one():
    assert len(ranges.several(ranges.axis_bounds(probes.trace(mask=fg.prefix_lm(9)).form, "k"))) == 1
    many = lambda b, h, q, k: (k == 1) | (k == 5) | (k == 9) | (k == 13) | (k == 17)  # noqa: E731
    assert len(ranges.several(ranges.axis_bounds(probes.trace(mask=many).form, "k"))) == 1, "beyond MAX_RANGES the hull is walked"


WAYS = {
    "sink and window": ["closed-form bounds in up to 2 ranges"], "document": ["classes of tiles from bounds of capture_0"],
    "causal document": ["closed-form bounds", "classes of tiles from bounds of capture_0"],
    "butterfly": ["the explicit blocks of capture_0"],
    "local and global": ["closed-form bounds", "the explicit blocks of capture_0"], "dense": ["the explicit blocks of capture_0"],
    "dilated": ["classes of tiles"],
    "global": ["closed-form bounds in up to 3 ranges", "the explicit blocks of capture_0"],
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
def test_explain_says_which_way_is_used(name):
    assert analyze(probes.trace(mask=MASKS[name]).form).ways == WAYS[name]
    if name in ("butterfly", "sink and window", "document"):
        q = torch.zeros(1, 2, L, 16)
        assert f"skipped by {', '.join(WAYS[name])}." in fg.compile(fg.Variant(mask=MASKS[name])).explain(q, q, q)


# ---- tables of bounds


@pytest.mark.parametrize("shape,dimensions", [((96,), 1), ((97,), 1), ((3, 50), 1), ((2, 70, 33), 2), ((1,), 1), ((64, 64), 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.uint8, torch.int8, torch.int16], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tables_hold_the_least_and_largest_of_each_block(shape, dimensions, dtype, device):
    t = torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=G).to(device, dtype)
    least, most = tables.block_bounds(t, dimensions)
    assert least.is_contiguous() and most.is_contiguous() and least.dtype == most.dtype == dtype
    blocked = [bounds.BLOCK if d >= len(shape) - dimensions else 1 for d in range(len(shape))]
    assert least.shape == tuple(-(-n // b) for n, b in zip(shape, blocked))
    for at in np.ndindex(*least.shape):
        block = t[tuple(slice(i * b, (i + 1) * b) for i, b in zip(at, blocked))]
        assert least[at] == block.min() and most[at] == block.max()


def test_tables_of_a_million_tokens_take_less_than_a_megabyte():
    parts = tables.block_bounds(torch.zeros(1 << 20, dtype=torch.int64), 1)
    assert sum(t.numel() * t.element_size() for t in parts) < 1_000_000


def test_how_captured_tensors_are_read():
    access = lambda mask: bounds.access(probes.trace(mask=mask).form)  # noqa: E731
    assert access(fg.document(IDS)) == {0: 1} and access(fg.document(IDS[None].expand(2, -1))) == {0: 1} and access(fg.from_dense(DENSE)) == {0: 2}
    assert access(fg.block_sparse(fg.butterfly(8), 24)) == {0: 0} and access(fg.block_sparse(fg.butterfly(8), 4)) == {0: 2}
    assert access(fg.padding(STARTS)) == {0: 0} and access(lambda b, h, q, k: STARTS[IDS[q]] <= k) == {0: 1, 1: 1}
    assert access(lambda b, h, q, k: DENSE[0, 0, q // 64, k]) == {} and access(lambda b, h, q, k: torch.zeros(L)[k] > 0) == {}


HARNESS = """
#include "fg/base.h"
#include "fg/interval.h"
using namespace fg;
extern "C" void one(const int* data, const int* least, const int* most, int size, int lo, int hi, long long* out) {
  const Span s = span_table<1>(data, least, most, Axis{Span{lo, hi}, size, 1});
  out[0] = s.lo, out[1] = s.hi;
}
extern "C" void two(const int* data, const int* least, const int* most, int rows, int columns, int a, int b, int c, int d, long long* out) {
  const Span s = span_table<2>(data, least, most, Axis{Span{1, 1}, 2, rows * columns}, Axis{Span{a, b}, rows, columns}, Axis{Span{c, d}, columns, 1});
  out[0] = s.lo, out[1] = s.hi;
}
extern "C" void blocks(const unsigned char* data, int rows, int columns, int a, int b, int size, int at, int* out) {
  const Axis lines{Span{a, b}, rows, columns}, along{Span{0, 0}, columns, 1};
  out[0] = blocks_from(data, lines, along, size, at), out[1] = blocks_before(data, lines, along, size, at);
}
"""


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("spans")
    (folder / "spans.cpp").write_text(HARNESS)
    include = str(settings.templates_directory() / "include")
    subprocess.run(["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-I", include, str(folder / "spans.cpp"), "-o", str(folder / "spans.so")], check=True)
    return ctypes.CDLL(str(folder / "spans.so"))


def pointer(t):
    return ctypes.c_void_p(t.data_ptr())


def test_a_table_answers_as_the_tensor_does(harness):
    out = torch.zeros(2, dtype=torch.int64)
    for size in (1, 31, 64, 77, 500):
        t = torch.randint(-99, 99, (size,), generator=G, dtype=torch.int32)
        least, most = tables.block_bounds(t, 1)
        for _ in range(40):
            lo, hi = sorted(torch.randint(-3, size + 3, (2,), generator=G).tolist())
            harness.one(pointer(t), pointer(least), pointer(most), size, lo, hi, pointer(out))
            part = t[min(max(lo, 0), size - 1) : min(max(hi, 0), size - 1) + 1]
            assert out.tolist() == [int(part.min()), int(part.max())], (size, lo, hi)


def test_a_table_over_two_dimensions_covers_and_is_exact_on_whole_blocks(harness):
    out = torch.zeros(2, dtype=torch.int64)
    rows, columns = 100, 130
    t = torch.randint(-99, 99, (2, rows, columns), generator=G, dtype=torch.int32)
    least, most = tables.block_bounds(t, 2)
    for _ in range(200):
        a, b = sorted(torch.randint(0, rows, (2,), generator=G).tolist())
        c, d = sorted(torch.randint(0, columns, (2,), generator=G).tolist())
        for whole in (False, True):
            if whole:
                a, b, c, d = a // 32 * 32, min(b // 32 * 32 + 31, rows - 1), c // 32 * 32, min(d // 32 * 32 + 31, columns - 1)
            harness.two(pointer(t), pointer(least), pointer(most), rows, columns, a, b, c, d, pointer(out))
            part = t[1, a : b + 1, c : d + 1]
            exact = [int(part.min()), int(part.max())]
            assert out.tolist() == exact if whole else out[0] <= exact[0] and out[1] >= exact[1], (a, b, c, d)


def test_steps_along_explicit_blocks(harness):
    out = torch.zeros(2, dtype=torch.int32)
    for _ in range(200):
        rows, columns, size = (int(torch.randint(1, n, (), generator=G)) for n in (5, 9, 20))
        t = torch.rand(rows, columns, generator=G) < 0.3
        a, b = sorted(torch.randint(0, rows, (2,), generator=G).tolist())
        seen = t[a : b + 1].any(0).repeat_interleave(size)
        at = int(torch.randint(0, len(seen) + 1, (), generator=G))
        harness.blocks(pointer(t), rows, columns, a, b, size, at, pointer(out))
        after, before = seen[at:].nonzero().flatten().tolist(), seen[:at].nonzero().flatten().tolist()
        if at < len(seen):  # beyond the last block indices count as in it
            assert out[0] == (at + after[0] if after else 2**31 - 1)
        assert out[1] == (before[-1] + 1 if before else 0)


# ---- compiled kernels


@pytest.mark.parametrize("name", MASKS)
def test_kernels_step_over_holes(name):
    variant = fg.Variant(mask=MASKS[name])
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, L, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = fg.compile(variant, plan={"amx": 0, "block_q": 8, "block_kv": 8})(q, k, v)
    want = reference(variant, q, k, v)[0]
    dout = torch.randn_like(out)
    for x, y in zip((out, *torch.autograd.grad(out, (q, k, v), dout)), (want, *torch.autograd.grad(want, (q, k, v), dout))):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)


def long_masks(length):
    """Masks over more keys than those up to which a call is short, with every kind of captured tensor."""
    torch.manual_seed(1)
    ids = torch.repeat_interleave(torch.arange(60, dtype=torch.int32), torch.randint(1, 60, (60,)))[: length + 3]
    ids = torch.nn.functional.pad(ids, (0, max(0, length + 3 - len(ids))), value=60)
    dense = torch.zeros(1, 2, length, length, dtype=torch.bool)
    dense[..., :300, 200:260], dense[:, 1, 700:, :40] = True, True
    flags = torch.zeros(length, dtype=torch.bool)
    flags[[0, 500]] = True
    packed = torch.stack([ids[:length], ids[:length].flip(0)]).to(torch.int64)
    return {
        "document": fg.document(ids) & fg.causal, "documents per item": fg.document(packed[:1]), "dense": fg.from_dense(dense),
        "global": fg.sliding_window(40, 40) | fg.global_tokens(flags),
        "small blocks": fg.block_sparse(torch.rand(-(-length // 7), -(-length // 7)) < 0.05, 7),
        "shifted": lambda b, h, q, k: ids[q + 1] == ids[(k - 2).clamp(0, length)],
        "int8": fg.mask(lambda b, h, q, k: packed[0, k].to(torch.int8) == 3), "listed": fg.block_sparse(fg.butterfly(-(-length // 64)), 64) & fg.causal,
    }  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", long_masks(1130))
def test_long_calls_read_tables(name, device):
    length = 1130
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, length, 16, device=device, requires_grad=True) for _ in range(3))
    with torch.device(device):
        variant = fg.Variant(mask=long_masks(length)[name])
        out = fg.compile(variant)(q, k, v)
        want = reference(variant, q, k, v)[0]
    dout = torch.randn_like(out)
    for x, y in zip((out, *torch.autograd.grad(out, (q, k, v), dout)), (want, *torch.autograd.grad(want, (q, k, v), dout))):
        torch.testing.assert_close(x, y, rtol=0, atol=2e-5)


def test_new_values_of_a_captured_tensor_are_read_at_each_call():
    length = 1100
    ids = torch.zeros(length, dtype=torch.int32)
    variant = fg.Variant(mask=fg.document(ids))
    kernel = fg.compile(variant)
    q, k, v = (torch.randn(1, 1, length, 8) for _ in range(3))
    kernel(q, k, v)
    ids.numpy()[700:] = 1  # torch sees nothing of this change
    torch.testing.assert_close(kernel(q, k, v), reference(variant, q, k, v)[0], rtol=0, atol=1e-5)
