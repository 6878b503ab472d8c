// Moving rows of a tensor into and out of tiles: conversion to `real`, transposition, zeros where nothing may be read.
#pragma once
#include "fg/cpu/vector.h"

namespace fg {

template <class A, class B> struct same_type { static constexpr bool value = false; };
template <class A> struct same_type<A, A> { static constexpr bool value = true; };

// tile[lane][d] = factor * source[lane][d], rows padded with zeros to ROW elements; lanes past `count` are rows of zeros.
template <int DIM, int ROW, int LANES, class T>
FG_FN void load_rows(const T* source, long long stride, int count, real factor, real* tile) {
  for (int lane = 0; lane < LANES; ++lane) {
    for (int d = 0; d < DIM; ++d) tile[lane * ROW + d] = lane < count ? to_real(source[lane * stride + d]) * factor : real(0);
    for (int d = DIM; d < ROW; ++d) tile[lane * ROW + d] = 0;
  }
}

// tile[d][lane] = rows[lane][d]; rows are ROW elements long, a multiple of WIDTH.
template <int DIM, int ROW, int LANES>
FG_FN void transpose_rows(const real* rows, real* tile) {
  for (int lane = 0; lane < LANES; lane += WIDTH) {
    for (int d = 0; d < DIM; d += WIDTH) {
      vec block[WIDTH];
#pragma GCC unroll 16
      for (int i = 0; i < WIDTH; ++i) block[i] = load(rows + (lane + i) * ROW + d);
      transpose_block(block);
#pragma GCC unroll 16
      for (int i = 0; i < WIDTH; ++i) {
        if (d + i < DIM) store(tile + (d + i) * LANES + lane, block[i]);
      }
    }
  }
}

template <class T>
FG_FN void store_elements(vec values, int count, T* target) {
  if (same_type<T, real>::value && count == WIDTH) {
    memcpy(target, &values, sizeof values);
  } else if (count == WIDTH) {
    for (int i = 0; i < WIDTH; ++i) target[i] = from_real<T>(values[i]);
  } else {
    for (int i = 0; i < count; ++i) target[i] = from_real<T>(values[i]);
  }
}

// target[lane][d] = tile[d][lane] * factor[lane] for the first `count` lanes; where the factor is 0 the row is 0 whatever the tile holds.
template <int DIM, int LANES, class T>
FG_FN void store_transposed(const real* tile, const real* factor, int count, T* target, long long stride) {
  for (int lane = 0; lane < count; lane += WIDTH) {
    const vec scale = load(factor + lane);
    for (int d = 0; d < DIM; d += WIDTH) {
      vec block[WIDTH];
#pragma GCC unroll 16
      for (int i = 0; i < WIDTH; ++i) {
        const vec product = d + i < DIM ? load(tile + (d + i) * LANES + lane) * scale : vec{};
        block[i] = scale == real(0) ? vec{} : product;
      }
      transpose_block(block);
      for (int i = 0; i < WIDTH && lane + i < count; ++i) store_elements(block[i], int_min(WIDTH, DIM - d), target + (lane + i) * stride + d);
    }
  }
}

// `count` rows in `real`: the tensor itself where it is stored so, else a copy in `tile`; `stride` becomes that of the result.
template <int DIM, class T>
FG_FN const real* rows_as_real(const T* source, long long& stride, int count, real* tile) {
  if constexpr (same_type<T, real>::value) {
    return source;
  } else {
    for (int n = 0; n < count; ++n) {
      for (int d = 0; d < DIM; ++d) tile[n * DIM + d] = to_real(source[n * stride + d]);
    }
    stride = DIM;
    return tile;
  }
}

// Sum over d of a[d] * b[d]; WIDTH running sums, so that a compiler makes vectors of them.
template <int DIM, class A, class B>
FG_FN real dot(const A* a, const B* b) {
  real sums[WIDTH] = {}, total = 0;
  for (int d = 0; d < DIM / WIDTH * WIDTH; d += WIDTH) {
    for (int i = 0; i < WIDTH; ++i) sums[i] += to_real(a[d + i]) * to_real(b[d + i]);
  }
  for (int d = DIM / WIDTH * WIDTH; d < DIM; ++d) total += to_real(a[d]) * to_real(b[d]);
  for (int i = 0; i < WIDTH; ++i) total += sums[i];
  return total;
}

FG_FN bool all_finite(const real* values, int count) {
  vec sum{};  // 0 * x is 0 or NaN
  for (int i = 0; i < count; i += WIDTH) sum += load(values + i) * real(0);
  real total = 0;
  for (int lane = 0; lane < WIDTH; ++lane) total += sum[lane];
  return total == 0;
}

}  // namespace fg
