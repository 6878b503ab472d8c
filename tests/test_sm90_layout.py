"""Do the sm90 family's tiles, descriptors, order of work and barriers fit together?

Layout and order are compiled by the host compiler from the very headers of the kernels and compared with the hardware's rules, written down here on their own.
The barriers are a small model of the kernel's producer and consumers: every interleaving rule of an mbarrier, random progress, all short trip counts.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashgen import build
from flashgen.families import sm90

INCLUDE = Path(__file__).parent.parent / "templates" / "include"
WIDTHS = (64, 32, 16)

PROBE = """
#include "fg/sm90/layout.cuh"
#include "fg/sm90/schedule.cuh"
template <int C, int R> unsigned chunk(int row, int at) { return fg::chunk_offset<C, R>(row, at); }
extern "C" {
unsigned chunk_offset(int columns, int rows, int row, int at) {
  if (rows == 80) return columns == 64 ? chunk<64, 80>(row, at) : columns == 32 ? chunk<32, 80>(row, at) : chunk<16, 80>(row, at);
  return columns == 64 ? chunk<64, 128>(row, at) : columns == 32 ? chunk<32, 128>(row, at) : chunk<16, 128>(row, at);
}
unsigned long long descriptor(int columns, unsigned address, unsigned block) {
  const unsigned low = fg::descriptor_low(address, block);
  return columns == 64 ? fg::descriptor<64>(low) : columns == 32 ? fg::descriptor<32>(low) : fg::descriptor<16>(low);
}
unsigned across(int columns, int step) {
  return columns == 64 ? fg::step_across<64, 128>(step) : columns == 32 ? fg::step_across<32, 128>(step) : fg::step_across<16, 128>(step);
}
unsigned down(int columns, int step) { return columns == 64 ? fg::step_down<64>(step) : columns == 32 ? fg::step_down<32>(step) : fg::step_down<16>(step); }
int work(int n, int tiles, int heads, int section, int shortest_last) {
  const fg::Work w = shortest_last ? fg::nth_longest_shortest_last(n, tiles, heads, section) : fg::nth_longest(n, tiles, heads, section);
  return w.head * 1000 + w.tile;
}
}
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe.cpp").write_text(PROBE)
    subprocess.run([*build.host_compiler(), "-std=c++17", "-shared", "-fPIC", f"-I{INCLUDE}", "probe.cpp", "-o", "probe.so"], cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "probe.so"))
    library.descriptor.restype = ctypes.c_ulonglong
    return library


def hardware_swizzle(columns: int, byte: int) -> int:
    """cuTensorMap's 128-, 64- and 32-byte swizzles: 16-byte chunk number xor the number of the 128-byte line, as far as the row is wide."""
    chunks = columns // 8
    return byte ^ (byte // 128 % chunks * 16)


def tma_byte(columns: int, rows: int, row: int, column: int) -> int:
    """Where TMA puts an element of a tile loaded as boxes of ``columns`` columns and ``rows`` rows."""
    return column // columns * rows * columns * 2 + hardware_swizzle(columns, row * columns * 2 + column % columns * 2)


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("rows", [80, 128])
def test_chunks_lie_where_tma_puts_them(probe, columns, rows):
    for row, chunk in itertools.product(range(rows), range(128 // 8)):
        assert probe.chunk_offset(columns, rows, row, chunk) == tma_byte(columns, rows, row, chunk * 8)


@pytest.mark.parametrize("columns", WIDTHS)
def test_eight_rows_of_a_chunk_meet_every_bank(columns):
    lines = {tma_byte(columns, 128, row, 0) % 128 // 16 for row in range(8)}
    assert len(lines) == 8


def fields(descriptor: int) -> tuple[int, int, int, int]:
    """start, leading and stride bytes, swizzle (PTX ISA, matrix descriptor)."""
    return (descriptor & 0x3FFF) << 4, (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4, descriptor >> 62


@pytest.mark.parametrize("columns", WIDTHS)
def test_descriptor_fields(probe, columns):
    start, leading, stride, swizzle = fields(probe.descriptor(columns, 0x2C400, 128 * columns * 2))
    assert (start, leading, stride, swizzle) == (0x2C400, 128 * columns * 2, 8 * columns * 2, {64: 1, 32: 2, 16: 3}[columns])


@pytest.mark.parametrize("columns", WIDTHS)
def test_steps_across_reach_the_depth_of_a_row_major_operand(probe, columns):
    """Element (row, k) of a K-major operand lies (row / 8) strides and row % 8 lines from the start, and the address is swizzled after the addition."""
    for step, row, k in itertools.product(range(128 // 16), (0, 1, 7, 8, 63), (0, 7, 8, 15)):
        start, _, stride, _ = fields(probe.descriptor(columns, 0, 16) + probe.across(columns, step))
        assert hardware_swizzle(columns, start + row // 8 * stride + row % 8 * columns * 2 + k * 2) == tma_byte(columns, 128, row, step * 16 + k)


@pytest.mark.parametrize("columns", WIDTHS)
def test_steps_down_reach_the_depth_of_a_column_major_operand(probe, columns):
    """Element (k, n) of an MN-major operand lies n / columns leading offsets and k / 8 strides from the start."""
    for step, k, n in itertools.product(range(128 // 16), range(16), (0, 8, 15, 16, 40, 63, 64, 127)):
        start, leading, stride, _ = fields(probe.descriptor(columns, 0, 128 * columns * 2) + probe.down(columns, step))
        byte = start + n // columns * leading + k // 8 * stride + k % 8 * columns * 2 + n % columns * 2
        assert hardware_swizzle(columns, byte) == tma_byte(columns, 128, step * 16 + k, n)


def test_scores_are_the_next_operand_without_an_exchange():
    """wgmma's accumulator layout, packed in pairs, is its A layout: registers 4 t .. 4 t + 3 are the fragments of depth step t."""
    accumulator = lambda lane, i: (lane // 4 + i // 2 % 2 * 8, i // 4 * 8 + lane % 4 * 2 + i % 2)  # noqa: E731 - (row, column) of s[i]
    operand = lambda lane, a: (lane // 4 + a % 2 * 8, a // 2 * 8 + lane % 4 * 2)  # noqa: E731 - (row, depth) of the lower half of register a
    for lane, step, a in itertools.product(range(32), range(8), range(4)):
        row, depth = operand(lane, a)
        for half in range(2):
            assert accumulator(lane, 2 * (4 * step + a) + half) == (row, step * 16 + depth + half)


@pytest.mark.parametrize("tiles, heads, section", [(1, 1, 1), (5, 3, 1), (5, 7, 3), (4, 8, 8), (7, 2, 2)])
def test_every_piece_is_taken_once_and_long_ones_first(probe, tiles, heads, section):
    order = [divmod(probe.work(n, tiles, heads, section, 0), 1000) for n in range(tiles * heads)]
    assert sorted(order) == sorted(itertools.product(range(heads), range(tiles)))
    for first in range(0, heads, section):
        own = [tile for head, tile in order if first <= head < first + section]
        assert own == sorted(own, reverse=True)


@pytest.mark.parametrize("tiles, heads, section", [(1, 1, 1), (5, 3, 1), (8, 7, 3), (9, 8, 8), (43, 2, 2)])
def test_the_shortest_pieces_of_all_heads_come_last(probe, tiles, heads, section):
    order = [divmod(probe.work(n, tiles, heads, section, 1), 1000) for n in range(tiles * heads)]
    assert sorted(order) == sorted(itertools.product(range(heads), range(tiles)))
    last = -(-tiles // 8)
    early, late = order[: (tiles - last) * heads], order[(tiles - last) * heads :]
    assert [tile for _, tile in late] == sorted([*range(last)] * heads, reverse=True)
    for first in range(0, heads, section):
        own = [tile for head, tile in early if first <= head < first + section]
        assert own == sorted(own, reverse=True)


@pytest.mark.parametrize("consumers", [1, 2, 3])
def test_registers_of_all_warpgroups_fit_the_launch(consumers):
    """setmaxnreg waits for ever for registers that the launch did not get: 65536 over all threads, rounded down to 8, times the warpgroups."""
    launched = 65536 // (128 * (consumers + 1)) // 8 * 8 * (consumers + 1)
    for consumer, producer in sm90.REGISTERS[consumers]:
        assert consumers * consumer + producer <= launched


# ---- the barrier protocol


class Barrier:
    """An mbarrier: a phase ends when ``count`` arrivals have come. wait(parity) passes once the phase of that parity is over."""

    def __init__(self, count: int):
        self.count, self.pending, self.phase = count, count, 0

    def arrive(self) -> None:
        self.pending -= 1
        assert self.pending >= 0, "an arrival too many in a phase"
        if self.pending == 0:
            self.pending, self.phase = self.count, self.phase + 1

    def passed(self, parity: int) -> bool:
        return self.phase % 2 != parity


class Ring:
    def __init__(self, slots: int):
        self.slots, self.slot, self.parity = slots, 0, 0

    def advance(self) -> None:
        self.slot += 1
        if self.slot == self.slots:
            self.slot, self.parity = 0, self.parity ^ 1


EMPTY, PARTIAL = 0, 1


class Model:
    """One block: what the producer and each consumer do to barriers and slots, as generators that yield where they wait."""

    def __init__(self, pieces: list[list[list[int]]], consumers: int, stages: int, q_stages: int, masked: bool):
        self.pieces, self.consumers, self.stages, self.q_stages, self.masked = pieces, consumers, stages, q_stages, masked
        self.q_full, self.k_full, self.v_full = ([Barrier(n) for _ in range(m)] for n, m in ((1, q_stages), (2 if masked else 1, stages), (1, stages)))
        self.q_empty, self.k_empty, self.v_empty = ([Barrier(consumers) for _ in range(m)] for m in (q_stages, stages, stages))
        self.work: list = [None] * q_stages
        self.k: list = [None] * stages
        self.v: list = [None] * stages
        self.next: list = [None] * stages
        self.seen: list[list] = [[] for _ in range(consumers)]

    def producer(self) -> Iterator[tuple[Barrier, int]]:
        q, k, v = Ring(self.q_stages), Ring(self.stages), Ring(self.stages)
        for number, kinds in enumerate(self.pieces):  # kinds[i][g]: class of the i-th tile from the right for group g
            described = -1
            for i in range(-1, len(kinds)):  # keys of tile i + 1 and values of tile i - 1; the first keys come before the queries
                if i >= 0 and self.masked:
                    self.next[described] = i + 1 if i + 1 < len(kinds) else -1
                    self.k_full[described].arrive()
                if i > 0:
                    yield from self.values(v, number, i - 1)
                if i + 1 < len(kinds):
                    yield self.k_empty[k.slot], k.parity ^ 1
                    self.k[k.slot], self.next[k.slot] = (number, i + 1), None
                    self.k_full[k.slot].arrive()
                    described = k.slot
                    k.advance()
                if i < 0:
                    yield self.q_empty[q.slot], q.parity ^ 1
                    self.work[q.slot] = (number, 0 if kinds else -1)
                    self.q_full[q.slot].arrive()
                    q.advance()
            if kinds:
                yield from self.values(v, number, len(kinds) - 1)
        yield self.q_empty[q.slot], q.parity ^ 1
        self.work[q.slot] = (-1, -1)
        self.q_full[q.slot].arrive()

    def values(self, v: Ring, number: int, tile: int) -> Iterator[tuple[Barrier, int]]:
        yield self.v_empty[v.slot], v.parity ^ 1
        self.v[v.slot] = (number, tile)
        self.v_full[v.slot].arrive()
        v.advance()

    def consumer(self, g: int) -> Iterator[tuple[Barrier, int]]:
        q, ring, before = Ring(self.q_stages), Ring(self.stages), 0
        while True:
            yield self.q_full[q.slot], q.parity
            number, tile = self.work[q.slot]
            if number < 0:
                return
            kinds, pending = self.pieces[number], None
            after = lambda i, slot, kinds=kinds: self.next[slot] if self.masked else i + 1 if i + 1 < len(kinds) else -1  # noqa: E731
            while tile >= 0 and pending is None and kinds[tile][g] == EMPTY:  # skip
                yield self.k_full[ring.slot], ring.parity
                assert self.k[ring.slot] == (number, tile)
                following = after(tile, ring.slot)
                self.k_empty[ring.slot].arrive()
                yield self.v_full[ring.slot], ring.parity
                assert self.v[ring.slot] == (number, tile)
                self.v_empty[ring.slot].arrive()
                ring.advance()
                tile = following
            while tile >= 0:  # first step, steps
                yield self.k_full[ring.slot], ring.parity
                assert self.k[ring.slot] == (number, tile)
                following = after(tile, ring.slot)
                if pending is not None:
                    yield self.v_full[before], before_parity  # noqa: F821 - set with pending
                    assert self.v[before] == (number, pending)
                self.k_empty[ring.slot].arrive()
                if pending is not None:
                    self.v_empty[before].arrive()
                self.seen[g].append((number, tile))
                pending, before, before_parity = tile, ring.slot, ring.parity
                ring.advance()
                tile = following
            assert self.work[q.slot][0] == number
            self.q_empty[q.slot].arrive()
            q.advance()
            if pending is not None:  # the last product
                yield self.v_full[before], before_parity
                assert self.v[before] == (number, pending)
                self.v_empty[before].arrive()

    def run(self, seed: int) -> None:
        chance = random.Random(seed)
        actors = [self.producer(), *(self.consumer(g) for g in range(self.consumers))]
        waits: list = [next(a, None) for a in actors]
        while any(w is not None for w in waits):
            ready = [i for i, w in enumerate(waits) if w is not None and w[0].passed(w[1])]
            assert ready, f"deadlock: {[w is not None for w in waits]}"
            i = chance.choice(ready)
            waits[i] = next(actors[i], None)


def _pieces(chance: random.Random, consumers: int, masked: bool) -> list[list[list[int]]]:
    """Up to five pieces of up to five tiles. Without a mask a group sees all tiles of a piece or, past the end, none."""
    found = []
    for _ in range(chance.randrange(6)):
        tiles = chance.randrange(6)
        past = [chance.random() < 0.2 for _ in range(consumers)]
        found.append([[chance.randrange(3) if masked else EMPTY if past[g] else PARTIAL for g in range(consumers)] for _ in range(tiles)])
    return found


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("consumers, stages, q_stages", [(1, 1, 1), (2, 2, 1), (2, 2, 2), (3, 2, 2), (3, 3, 2)])
def test_no_order_of_events_deadlocks_or_reads_the_wrong_tile(masked, consumers, stages, q_stages):
    for seed in range(150):
        pieces = _pieces(random.Random(seed), consumers, masked)
        model = Model(pieces, consumers, stages, q_stages, masked)
        model.run(seed)
        for g in range(consumers):
            expected = []
            for number, kinds in enumerate(pieces):
                first = next((i for i, k in enumerate(kinds) if k[g] != EMPTY), len(kinds))
                expected += [(number, i) for i in range(first, len(kinds))]
            assert model.seen[g] == expected
