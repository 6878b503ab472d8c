// Rows of the backward's tensors: tiles by TMA, and dot products of rows. Include after fg/sm90/ptx.cuh.
#pragma once
#include "fg/base.h"

namespace fg {

constexpr int BOX_ROWS = 64;  // of every tensor map of a backward

// A tile of ROWS rows and DIM columns in blocks of COLUMNS, box by box. of: the batch item, or the rows of the packed sequence.
template <int DIM, int COLUMNS, int ROWS, class S, class Of>
FG_FN void load_tile(S* to, const TensorMap& map, Barrier& arrival, int row, int head, Of of, unsigned long long policy) {
#pragma unroll
  for (int d = 0; d < DIM; d += COLUMNS)
#pragma unroll
    for (int r = 0; r < ROWS; r += BOX_ROWS) tma_load(to + d * ROWS + r * COLUMNS, map, arrival, d, row + r, head, of, policy);
}

// Two values of 16 bits in one register.
template <class S> FG_FN float low_half(unsigned x) { return to_real(S{(unsigned short)x}); }
template <class S> FG_FN float high_half(unsigned x) { return to_real(S{(unsigned short)(x >> 16)}); }
// The dot product of eight pairs of values.
template <class S> FG_FN float dot_chunk(uint4 x, uint4 y) {
  return low_half<S>(x.x) * low_half<S>(y.x) + high_half<S>(x.x) * high_half<S>(y.x) + low_half<S>(x.y) * low_half<S>(y.y) + high_half<S>(x.y) * high_half<S>(y.y) +
         low_half<S>(x.z) * low_half<S>(y.z) + high_half<S>(x.z) * high_half<S>(y.z) + low_half<S>(x.w) * low_half<S>(y.w) + high_half<S>(x.w) * high_half<S>(y.w);
}

}  // namespace fg
