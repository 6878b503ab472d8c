// Register-blocked products C = A B over small tiles, the inner loops of every CPU kernel: ROWS rows of C times VECTORS vectors of its columns stay
// in registers; per step of the depth one element of A per row is broadcast and multiplied with VECTORS vectors of B.
#pragma once
#include "fg/cpu/vector.h"

namespace fg {

// As many rows as the register file holds beside one row of B and a broadcast element; eight hide the latency of a multiply-add.
constexpr int rows_for(int vectors) { return FG_VECTOR_REGISTERS == 32 ? (vectors <= 3 ? 8 : 6) : vectors == 1 ? 8 : vectors == 2 ? 6 : vectors == 3 ? 4 : 2; }
template <class I> constexpr I round_up(I n, I unit) { return (n + unit - 1) / unit * unit; }

template <int ROWS, int VECTORS, class A>
FG_FN void multiply_block(vec (&sum)[ROWS][VECTORS], A a, const real* b, int b_stride, int depth) {
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) sum[i][j] = vec{};
  }
  for (int c = 0; c < depth; ++c, b += b_stride) {
    vec right[VECTORS];
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) right[j] = load(b + j * WIDTH);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
      const real left = a(i, c);
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; ++j) sum[i][j] += left * right[j];
    }
  }
}

// Rows of K or V that the next product reads: a product asks for them while it works, since the strided order in which rows are read within a product
// hides them from the hardware's prefetcher.
struct Ahead {
  const real* rows;
  long long stride;
  int count, columns;
};
FG_FN void fetch(const Ahead& ahead, int first, int rows) {
  for (int n = first; n < int_min(first + rows, ahead.count); ++n) {
    for (int d = 0; d < ahead.columns; d += 64 / (int)sizeof(real)) __builtin_prefetch(ahead.rows + n * ahead.stride + d, 0, 2);
  }
}

// tile[key][lane] = sum over d of rows[key][d] * columns[d][lane], for `count` keys; tile has room for count rounded up to rows_for(VECTORS).
// Rows past the count repeat the last one: nothing behind it is read.
template <int VECTORS>
FG_FN void multiply_rows(const real* rows, long long stride, int count, const real* columns, int depth, real* tile, const Ahead& ahead = {}) {
  constexpr int ROWS = rows_for(VECTORS);
  for (int first = 0; first < count; first += ROWS) {
    fetch(ahead, first, ROWS);
    const real* row[ROWS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) row[i] = rows + (first + i < count ? first + i : count - 1) * stride;
    vec sum[ROWS][VECTORS];
    multiply_block<ROWS, VECTORS>(sum, [&](int i, int c) { return row[i][c]; }, columns, VECTORS * WIDTH, depth);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; ++j) store(tile + (first + i) * VECTORS * WIDTH + j * WIDTH, sum[i][j]);
    }
  }
}

template <int ROWS, int VECTORS>
FG_FN void accumulate_columns_block(const real* rows, long long stride, int count, const real* tile, const vec* decay, real* target) {
  vec sum[ROWS][VECTORS];
  multiply_block<ROWS, VECTORS>(sum, [&](int i, int c) { return rows[c * stride + i]; }, tile, VECTORS * WIDTH, count);
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) {
      real* const at = target + i * VECTORS * WIDTH + j * WIDTH;
      store(at, decay ? load(at) * decay[j] + sum[i][j] : load(at) + sum[i][j]);
    }
  }
}

// target[d][lane] = target[d][lane] * decay[lane] + sum over keys of rows[key][d] * tile[key][lane], for d < DIM; no decay: 1.
template <int DIM, int VECTORS>
FG_FN void accumulate_columns(const real* rows, long long stride, int count, const real* tile, const vec* decay, real* target, const Ahead& ahead = {}) {
  constexpr int ROWS = rows_for(VECTORS), TAIL = DIM % ROWS, MAIN = DIM - TAIL;
  const int each = (ahead.count * ROWS + MAIN - 1) / int_max(MAIN, 1);
  for (int d = 0, n = 0; d < MAIN; d += ROWS, n += each) {
    fetch(ahead, n, each);
    accumulate_columns_block<ROWS, VECTORS>(rows + d, stride, count, tile, decay, target + d * VECTORS * WIDTH);
  }
  if constexpr (TAIL > 0) accumulate_columns_block<TAIL, VECTORS>(rows + MAIN, stride, count, tile, decay, target + MAIN * VECTORS * WIDTH);
}

template <int ROWS, int VECTORS>
FG_FN void accumulate_rows_block(const real* tile, int tile_stride, int count, const real* columns, int columns_stride, int depth, real* target) {
  for (int first = 0; first < count; first += ROWS) {
    const real* row[ROWS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) row[i] = tile + (first + i < count ? first + i : count - 1) * tile_stride;
    vec sum[ROWS][VECTORS];
    multiply_block<ROWS, VECTORS>(sum, [&](int i, int c) { return row[i][c]; }, columns, columns_stride, depth);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
      if (first + i >= count) break;
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; ++j) {
        real* const at = target + (long long)(first + i) * columns_stride + j * WIDTH;
        store(at, load(at) + sum[i][j]);
      }
    }
  }
}

// target[key][d] += sum over lanes of tile[key][lane] * columns[lane][d], for `count` keys; rows of target and columns are COLUMNS (a multiple of WIDTH) long.
template <int COLUMNS>
FG_FN void accumulate_rows(const real* tile, int tile_stride, int count, const real* columns, int depth, real* target) {
  constexpr int VECTORS = COLUMNS / WIDTH, PASSES = (VECTORS + 3) / 4, EACH = (VECTORS + PASSES - 1) / PASSES, LAST = VECTORS - (PASSES - 1) * EACH;
  for (int pass = 0; pass < PASSES - 1; ++pass) {
    const int d = pass * EACH * WIDTH;
    accumulate_rows_block<rows_for(EACH), EACH>(tile, tile_stride, count, columns + d, COLUMNS, depth, target + d);
  }
  constexpr int d = (PASSES - 1) * EACH * WIDTH;
  accumulate_rows_block<rows_for(LAST), LAST>(tile, tile_stride, count, columns + d, COLUMNS, depth, target + d);
}

// accumulate_columns with the products that visible(n, lane) denies left out: 0 * NaN must not reach a row that does not see the key. Slow and rare.
template <int DIM, int VECTORS, class Visible>
FG_FN void accumulate_visible_columns(const real* rows, long long stride, int count, const real* tile, const vec* decay, real* target, Visible visible) {
  constexpr int LANES = VECTORS * WIDTH;
  if (decay) {
    for (int i = 0; i < DIM * VECTORS; ++i) store(target + i * WIDTH, load(target + i * WIDTH) * decay[i % VECTORS]);
  }
  for (int n = 0; n < count; ++n) {
    bool seen[LANES];
    for (int lane = 0; lane < LANES; ++lane) seen[lane] = visible(n, lane);
    for (int d = 0; d < DIM; ++d) {
      for (int lane = 0; lane < LANES; ++lane) {
        const real product = rows[n * stride + d] * tile[n * LANES + lane];
        target[d * LANES + lane] += seen[lane] ? product : real(0);
      }
    }
  }
}

}  // namespace fg
