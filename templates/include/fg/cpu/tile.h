// Moving rows of a tensor into and out of tiles: conversion to `real`, transposition, zeros where nothing may be read.
#pragma once
#include "fg/cpu/vector.h"

namespace fg {

template <class A, class B> struct same_type { static constexpr bool value = false; };
template <class A> struct same_type<A, A> { static constexpr bool value = true; };

// tile[d][lane] = factor * source[lane][d]; lanes past `count` are 0.
template <int DIM, int LANES, class T>
FG_FN void load_transposed(const T* source, long long stride, int count, real factor, real* tile) {
  for (int lane = 0; lane < LANES; ++lane) {
    if (lane < count) {
      for (int d = 0; d < DIM; ++d) tile[d * LANES + lane] = to_real(source[lane * stride + d]) * factor;
    } else {
      for (int d = 0; d < DIM; ++d) tile[d * LANES + lane] = 0;
    }
  }
}

// tile[lane][d] = factor * source[lane][d], rows padded with zeros to ROW elements; lanes past `count` are rows of zeros.
template <int DIM, int ROW, int LANES, class T>
FG_FN void load_rows(const T* source, long long stride, int count, real factor, real* tile) {
  for (int lane = 0; lane < LANES; ++lane) {
    for (int d = 0; d < DIM; ++d) tile[lane * ROW + d] = lane < count ? to_real(source[lane * stride + d]) * factor : real(0);
    for (int d = DIM; d < ROW; ++d) tile[lane * ROW + d] = 0;
  }
}

// tile[d][lane] = rows[lane][d]
template <int DIM, int ROW, int LANES>
FG_FN void transpose_rows(const real* rows, real* tile) {
  for (int lane = 0; lane < LANES; ++lane) {
    for (int d = 0; d < DIM; ++d) tile[d * LANES + lane] = rows[lane * ROW + d];
  }
}

// target[lane][d] = tile[d][lane] * factor[lane] for the first `count` lanes; where the factor is 0 the row is 0 whatever the tile holds.
template <int DIM, int LANES, class T>
FG_FN void store_transposed(const real* tile, const real* factor, int count, T* target, long long stride) {
  for (int lane = 0; lane < count; ++lane) {
    for (int d = 0; d < DIM; ++d) target[lane * stride + d] = from_real<T>(factor[lane] == 0 ? real(0) : tile[d * LANES + lane] * factor[lane]);
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

FG_FN bool all_finite(const real* values, int count) {
  vec sum{};  // 0 * x is 0 or NaN
  for (int i = 0; i < count; i += WIDTH) sum += load(values + i) * real(0);
  real total = 0;
  for (int lane = 0; lane < WIDTH; ++lane) total += sum[lane];
  return total == 0;
}

}  // namespace fg
