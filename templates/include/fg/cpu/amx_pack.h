// Bringing bfloat16 rows into the shapes that tile registers are loaded from (see amx.h). Elements are only moved: NaN and Inf keep their bits.
#pragma once
#include "fg/cpu/amx.h"

namespace fg {

// pairs[d / 2][lane] of source[lane][d]; lanes past `count` and d from DIM to DEPTH (a multiple of 32) are 0.
template <int DIM, int DEPTH, int LANES>
FG_FN void pack_columns(const bf16* source, long long stride, int count, unsigned* target) {
  for (int lane = 0; lane < LANES; ++lane) {
    unsigned short row[DEPTH] = {};
    if (lane < count) memcpy(row, source + lane * stride, DIM * sizeof(bf16));
    for (int d = 0; d < DEPTH; d += 2) target[d / 2 * LANES + lane] = row[d] | (unsigned)row[d + 1] << 16;
  }
}

// `room` rows of DEPTH elements (a multiple of 32) holding `count` rows of the source; the rest is 0.
template <int DIM, int DEPTH>
FG_FN void pack_rows(const bf16* source, long long stride, int count, int room, bf16* target) {
  for (int n = 0; n < room; ++n) {
    memset(target + n * DEPTH, 0, DEPTH * sizeof(bf16));
    if (n < count) memcpy(target + n * DEPTH, source + n * stride, DIM * sizeof(bf16));
  }
}

// One block of 32 keys transposed: target[d][n] = source[n][d], d < DEPTH (a multiple of 32); keys past `count` and d past DIM are 0.
template <int DIM, int DEPTH>
FG_FN void pack_transposed(const bf16* source, long long stride, int count, bf16* target) {
  for (int n = 0; n < 32; n += 2) {
    unsigned short even[DEPTH] = {}, odd[DEPTH] = {};
    if (n < count) memcpy(even, source + n * stride, DIM * sizeof(bf16));
    if (n + 1 < count) memcpy(odd, source + (n + 1) * stride, DIM * sizeof(bf16));
    for (int d = 0; d < DEPTH; ++d) {
      const unsigned pair = even[d] | (unsigned)odd[d] << 16;
      memcpy(target + d * 32 + n, &pair, 4);
    }
  }
}

}  // namespace fg
