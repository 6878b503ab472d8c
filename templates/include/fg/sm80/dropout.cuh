// Dropout in the layouts of this family's accumulators.
#pragma once
#include "fg/dropout.cuh"
#include "fg/sm80/ptx.cuh"

namespace fg {

// Kept entries of 64 x 64 tiles as fg/sm80/simt.cuh shares them out: row simt_down() + 16 i, column simt_across() + 16 j. Of four lanes that see the same keys,
// each draws for one i; q_first and k_first are the tile's.
FG_FN unsigned simt_draw(const Dropout& d, int q_first, int k_first) {
  const int across = threadIdx.x % 16, down = threadIdx.x / 16;
  unsigned drawn = 0;
#pragma unroll 2
  for (int j = 0; j < 4; ++j) drawn |= kept_four(d, (k_first + across) / 4 + 4 * j, q_first + down + 16 * (across % 4)) << 4 * j;
  return drawn;
}
// Bit 4 j: whether entry j of row i is kept.
FG_FN unsigned simt_kept(unsigned drawn, int i) {
  const int lane = threadIdx.x % 32;
  return __shfl_sync(ALL_LANES, drawn, (lane & ~3) | i) >> lane % 4;
}

}  // namespace fg
