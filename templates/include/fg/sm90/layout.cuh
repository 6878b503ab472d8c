// How tiles lie in shared memory, as TMA writes them and wgmma reads them: blocks of COLUMNS elements (64, 32 or 16: rows of 128, 64 or 32 bytes), block after
// block, each with all rows of the tile; within 8 rows the 16-byte chunks are exchanged so that a column of chunks meets every bank.
#pragma once
#include "fg/base.h"

namespace fg {

// The hardware exclusive-ors address bits 4..6 (64-byte rows: 4..5, 32-byte rows: 4) with those three places up. Blocks start on multiples of 8 rows.
template <int COLUMNS> FG_FN unsigned swizzled(unsigned byte) {
  constexpr unsigned CHUNKS = COLUMNS == 64 ? 0x70 : COLUMNS == 32 ? 0x30 : 0x10;
  return byte ^ (byte >> 3 & CHUNKS);
}

// Byte of 16-byte chunk `chunk` of a row in a tile of ROWS rows.
template <int COLUMNS, int ROWS> FG_FN unsigned chunk_offset(int row, int chunk) {
  constexpr int CHUNKS = COLUMNS / 8;
  return (unsigned)(chunk / CHUNKS * ROWS * COLUMNS * 2) + swizzled<COLUMNS>((unsigned)(row * COLUMNS * 2 + chunk % CHUNKS * 16));
}

// wgmma's matrix descriptor (PTX ISA 9.0, 9.7.15.5.1.2), all in units of 16 bytes. Lower half: start address, and the distance of blocks, which is read only where
// they lie along M or N. Upper half: 8 rows, and the kind of swizzle. Only the lower half moves, and without a carry: it is kept and added to on its own.
using Descriptor = unsigned long long;
FG_FN unsigned descriptor_low(unsigned address, unsigned block_bytes) { return address >> 4 | block_bytes >> 4 << 16; }
template <int COLUMNS> FG_FN Descriptor descriptor(unsigned low) {
  constexpr unsigned SWIZZLE = COLUMNS == 64 ? 1 : COLUMNS == 32 ? 2 : 3;
  return (Descriptor)((unsigned)COLUMNS | SWIZZLE << 30) << 32 | low;
}

// What the lower half grows by from one step of 16 along the product's depth to the next: across the columns of a tile of ROWS rows, or down its rows.
template <int COLUMNS, int ROWS> FG_FN constexpr unsigned step_across(int step) {
  return (step * 16 / COLUMNS * ROWS * COLUMNS * 2 + step * 16 % COLUMNS * 2) / 16;
}
template <int COLUMNS> FG_FN constexpr unsigned step_down(int step) { return step * COLUMNS * 2; }

}  // namespace fg
