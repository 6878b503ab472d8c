// Products of tiles in shared memory by mma.sync, one warp's part.
#pragma once
#include "fg/sm80/tile.cuh"

namespace fg {

// Where a lane points for ldmatrix. Its four matrices cover 16 rows x 2 chunks of a tile and arrive in the register order of an mma operand:
//   down    matrix 1 lies 8 rows below matrix 0: A from a tile [m][k], B (two n tiles) from a tile [k][n], transposed on the way;
//   across  matrix 1 lies one chunk to the right: A from a tile [k][m], transposed on the way, B (two n tiles) from a tile [n][k].
// A walk goes on by constants. Over a power of two of chunks from a multiple of it (EXTENT, or from 0) the constant is XORed into the lane's own address.
template <class TILE, int EXTENT> struct Lane {
  static constexpr bool POWER_OF_TWO = EXTENT > 0 && (EXTENT & (EXTENT - 1)) == 0;
  unsigned address, chunk, flip;

  FG_FN unsigned step(int row, int chunks) const {  // row: a multiple of 8
    if constexpr (POWER_OF_TWO) return (address ^ (chunks % TILE::SPAN * 16)) + (chunks / TILE::SPAN * TILE::SPAN * 16 + row * TILE::PITCH);
    return address + ((chunk + chunks) ^ flip) * 16 + row * TILE::PITCH;
  }
  FG_FN Lane shifted(unsigned bytes) const { return Lane{address + bytes, chunk, flip}; }
  FG_FN Lane moved(int chunks) const { return Lane{POWER_OF_TWO ? step(0, chunks) : address, chunk + chunks, flip}; }
};
template <int EXTENT, class TILE> FG_FN Lane<TILE, EXTENT> lane_at(const TILE& tile, int row, int chunk) {
  const unsigned flip = TILE::swizzle(row), line = shared_address(tile.bits) + row * TILE::PITCH;
  return {Lane<TILE, EXTENT>::POWER_OF_TWO ? line + (chunk ^ flip) * 16 : line, (unsigned)chunk, flip};
}
// EXTENT 1: the walk starts at chunk 0, however far it goes. EXTENT 0: it starts anywhere.
template <int EXTENT = 1, class TILE> FG_FN Lane<TILE, EXTENT> lane_down(const TILE& tile, int row, int chunk = 0) {
  const int lane = threadIdx.x % 32;
  return lane_at<EXTENT>(tile, row + lane % 16, chunk + lane / 16);
}
template <int EXTENT = 1, class TILE> FG_FN Lane<TILE, EXTENT> lane_across(const TILE& tile, int row, int chunk = 0) {
  const int lane = threadIdx.x % 32;
  return lane_at<EXTENT>(tile, row + lane % 8 + lane / 16 * 8, chunk + lane / 8 % 2);
}

template <class T, int M, int N> FG_FN void mma_row(float (&acc)[M][N][4], const unsigned (&a)[M][4], const unsigned (&b)[4], int n) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
    mma<T>(acc[m][n], a[m], b[0], b[1]);
    mma<T>(acc[m][n + 1], a[m], b[2], b[3]);
  }
}

// acc[m][n] += A B over STEPS steps of 16 of k; m counts 16 rows, n counts 8 columns. A_KM: A lies as [k][m] (lane across), else [m][k] (lane down);
// B_NK: B lies as [n][k] (lane across), else [k][n] (lane down).
template <class T, int STEPS, bool A_KM, bool B_NK, int UNROLL = STEPS, int M, int N, class LANE_A, class LANE_B>
FG_FN void multiply(float (&acc)[M][N][4], const LANE_A& a_lane, const LANE_B& b_lane) {
#pragma unroll UNROLL
  for (int k = 0; k < STEPS; ++k) {
    unsigned a[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) {
      if constexpr (A_KM) load_matrices_transposed(a[m], a_lane.step(k * 16, m * 2));
      else load_matrices(a[m], a_lane.step(m * 16, k * 2));
    }
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      unsigned b[4];
      if constexpr (B_NK) load_matrices(b, b_lane.step(n * 8, k * 2));
      else load_matrices_transposed(b, b_lane.step(k * 16, n));
      mma_row<T>(acc, a, b, n);
    }
  }
}

// The same with A in registers, STEPS steps of it.
template <class T, bool B_NK, int STEPS, int M, int N, class LANE_B>
FG_FN void multiply(float (&acc)[M][N][4], const unsigned (&a)[STEPS][M][4], const LANE_B& b_lane) {
#pragma unroll
  for (int k = 0; k < STEPS; ++k) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      unsigned b[4];
      if constexpr (B_NK) load_matrices(b, b_lane.step(n * 8, k * 2));
      else load_matrices_transposed(b, b_lane.step(k * 16, n));
      mma_row<T>(acc, a[k], b, n);
    }
  }
}

// Accumulators of columns 16 k .. 16 k + 15, rounded to T: operand A of a product over those columns.
template <class T, int M, int N> FG_FN void pack_operand(unsigned (&a)[M][4], const float (&acc)[M][N][4], int k) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
    a[m][0] = pack<T>(acc[m][2 * k][0], acc[m][2 * k][1]);
    a[m][1] = pack<T>(acc[m][2 * k][2], acc[m][2 * k][3]);
    a[m][2] = pack<T>(acc[m][2 * k + 1][0], acc[m][2 * k + 1][1]);
    a[m][3] = pack<T>(acc[m][2 * k + 1][2], acc[m][2 * k + 1][3]);
  }
}

template <int M, int N> FG_FN void clear(float (&acc)[M][N][4]) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[m][n][e] = 0.0f;
}

// Where a lane's own accumulators lie in a tile: element pairs at (row + lane / 4, column + 2 (lane % 4)), `row` and `column` / 8 as in Lane.
template <int EXTENT = 1, class TILE> FG_FN Lane<TILE, EXTENT> lane_own(const TILE& tile, int row, int chunk = 0) {
  const int lane = threadIdx.x % 32;
  return lane_at<EXTENT>(tile, row + lane / 4, chunk).shifted(lane % 4 * 4);
}
// Rounds accumulators to T and writes them to a tile.
template <class T, int M, int N, class LANE> FG_FN void store_accumulators(const LANE& own, const float (&acc)[M][N][4]) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) store_shared(own.step(m * 16 + i * 8, n), pack<T>(acc[m][n][2 * i], acc[m][n][2 * i + 1]));
}

}  // namespace fg
