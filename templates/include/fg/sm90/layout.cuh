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

// wgmma's matrix descriptor (PTX ISA 9.0, 9.7.15.5.1.2): start address, leading offset (the distance of blocks; read only where the blocks lie along M or N),
// stride offset (8 rows), kind of swizzle; addresses and offsets in units of 16 bytes.
using Descriptor = unsigned long long;
template <int COLUMNS> FG_FN Descriptor descriptor(unsigned address, unsigned block_bytes) {
  constexpr unsigned long long SWIZZLE = COLUMNS == 64 ? 1 : COLUMNS == 32 ? 2 : 3;
  return (Descriptor)((address & 0x3ffff) >> 4) | (Descriptor)(block_bytes >> 4) << 16 | (Descriptor)COLUMNS << 32 | SWIZZLE << 62;
}

// What a descriptor grows by from one step of 16 along the product's depth to the next: across the columns of a tile of ROWS rows, or down its rows.
template <int COLUMNS, int ROWS> FG_FN constexpr Descriptor step_across(int step) {
  return (Descriptor)(step * 16 / COLUMNS * ROWS * COLUMNS * 2 + step * 16 % COLUMNS * 2) >> 4;
}
template <int COLUMNS> FG_FN constexpr Descriptor step_down(int step) { return (Descriptor)(step * 16 * COLUMNS * 2) >> 4; }

}  // namespace fg
