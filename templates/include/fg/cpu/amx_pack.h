// Bringing bfloat16 rows into the shapes that tile registers are loaded from (see amx.h). Elements are only moved: NaN and Inf keep their bits.
#pragma once
#include "fg/cpu/amx.h"
#include "fg/cpu/tile.h"

namespace fg {

// `room` rows of DEPTH elements (a multiple of 32) holding `count` rows of the source; the rest is 0.
template <int DIM, int DEPTH>
FG_FN void pack_rows(const bf16* source, long long stride, int count, int room, bf16* target) {
  for (int n = 0; n < room; ++n) {
    memset(target + n * DEPTH, 0, DEPTH * sizeof(bf16));
    if (n < count) memcpy(target + n * DEPTH, source + n * stride, DIM * sizeof(bf16));
  }
}

// The lower (ODD = 0) or upper halves of 32 pairs.
typedef unsigned short halves __attribute__((vector_size(64), may_alias));
template <int ODD, int... L>
FG_FN halves split_halves(halves low, halves high, std::integer_sequence<int, L...>) {
#if defined(__clang__)
  return __builtin_shufflevector(low, high, (2 * L + ODD)...);
#else
  return __builtin_shuffle(low, high, halves{(2 * L + ODD)...});
#endif
}

// Right factors from packed rows: target[d / 2][lane] pairs neighbours of a row (the depth is d), target[lane / 2][d] neighbouring rows (the depth is the row).
template <int DEPTH, int LANES>
FG_FN void pair_columns(const bf16* rows, unsigned* target) {
  transpose_rows<DEPTH / 2, DEPTH / 2, LANES>((const float*)rows, (float*)target);  // pairs are moved, not computed with
}
template <int DEPTH, int LANES>
FG_FN void pair_rows(const bf16* rows, unsigned* target) {
  for (int lane = 0; lane < LANES; lane += 2) {
    for (int d = 0; d < DEPTH; ++d) target[lane / 2 * DEPTH + d] = rows[lane * DEPTH + d].bits | (unsigned)rows[(lane + 1) * DEPTH + d].bits << 16;
  }
}

// One block of 32 keys transposed: target[d][n] = source[n][d], d < DEPTH (a multiple of 32); keys past `count` and d past DIM are 0.
template <int DIM, int DEPTH>
FG_FN void pack_transposed(const bf16* source, long long stride, int count, bf16* target) {
  alignas(64) bf16 rows[32 * DEPTH];
  alignas(64) unsigned columns[DEPTH / 2 * 32];  // [d / 2][n], pairs along d
  pack_rows<DIM, DEPTH>(source, stride, count, 32, rows);
  pair_columns<DEPTH, 32>(rows, columns);
  for (int d = 0; d < DEPTH; d += 2) {
    const halves low = *(const halves*)(columns + d / 2 * 32), high = *(const halves*)(columns + d / 2 * 32 + 16);
    *(halves*)(target + d * 32) = split_halves<0>(low, high, std::make_integer_sequence<int, 32>());
    *(halves*)(target + (d + 1) * 32) = split_halves<1>(low, high, std::make_integer_sequence<int, 32>());
  }
}

}  // namespace fg
