// Products of 64 x 64 tiles by plain float32 multiply-adds, for any type and head dim: 256 threads as 16 x 16, each with 4 x 4 elements of a tile.
#pragma once
#include "fg/sm80/ptx.cuh"

namespace fg {

constexpr int SIMT_THREADS = 256, SIMT_TILE = 64;  // rows and columns of every tile
constexpr int SIMT_STEP = 32;                      // columns of the contraction that are staged at a time

// Staged operands, both [row][d]; a pitch of 36 floats keeps reads of 4 neighbours by 8 consecutive rows free of bank conflicts.
struct SimtOperands { alignas(16) float a[SIMT_TILE][SIMT_STEP + 4], b[SIMT_TILE][SIMT_STEP + 4]; };
struct SimtTile { alignas(16) float at[SIMT_TILE][SIMT_TILE + 4]; };

FG_FN int simt_across() { return threadIdx.x % 16; }  // a thread's elements: rows simt_down() + 16 i, columns simt_across() + 16 j ...
FG_FN int simt_down() { return threadIdx.x / 16; }    // ... or, of a product with SimtTile, columns 4 simt_across() + j

// A block of a row-major matrix to shared memory as floats: what lies beyond `rows` or `columns` becomes zero and is never read.
template <int WIDTH, int PITCH, class T>
FG_FN void simt_load(float (&target)[SIMT_TILE][PITCH], const T* source, long long stride, int rows, int columns) {
  const int column = threadIdx.x % WIDTH;
#pragma unroll 4
  for (int row = threadIdx.x / WIDTH; row < SIMT_TILE; row += SIMT_THREADS / WIDTH)
    target[row][column] = row < rows && column < columns ? to_real(source[row * stride + column]) : 0.0f;
}

// acc[i][j] += sum over DIM columns of a(row i, d) b(row j, d), both from global memory. Begins and ends with a barrier.
template <int DIM, class T>
FG_FN void simt_scores(float (&acc)[4][4], SimtOperands& smem, const T* a, long long a_stride, int a_rows, const T* b, long long b_stride, int b_rows) {
#pragma unroll 1
  for (int d = 0; d < DIM; d += SIMT_STEP) {
    __syncthreads();
    simt_load<SIMT_STEP>(smem.a, a + d, a_stride, a_rows, DIM - d);
    simt_load<SIMT_STEP>(smem.b, b + d, b_stride, b_rows, DIM - d);
    __syncthreads();
#pragma unroll 2
    for (int step = 0; step < SIMT_STEP; step += 4) {
      float4 x[4], y[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = *reinterpret_cast<const float4*>(&smem.a[simt_down() + 16 * i][step]);
        y[i] = *reinterpret_cast<const float4*>(&smem.b[simt_across() + 16 * i][step]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[i][j] += x[i].x * y[j].x + x[i].y * y[j].y + x[i].z * y[j].z + x[i].w * y[j].w;
    }
  }
  __syncthreads();
}

// What stands for an absent key in a tile of weights: a NaN that no computation yields. It is skipped, whatever the other factor is.
constexpr unsigned ABSENT = 0xfffedcbau;
FG_FN float absent() { return bits_to_float(ABSENT); }

// acc[i][j] += sum over the 64 columns k of weights(row i, k) values(k, column j). SELECT: some weights may be absent.
template <bool SELECT> FG_FN void simt_accumulate(float (&acc)[4][4], const SimtTile& weights, const SimtTile& values) {
#pragma unroll 1  // unrolled for every chunk of columns and class of tile it would take seconds to compile
  for (int k = 0; k < SIMT_TILE; k += 4) {
    float4 w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = *reinterpret_cast<const float4*>(&weights.at[simt_down() + 16 * i][k]);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const float4 v = *reinterpret_cast<const float4*>(&values.at[k + step][4 * simt_across()]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float weight = step == 0 ? w[i].x : step == 1 ? w[i].y : step == 2 ? w[i].z : w[i].w;
        if (!SELECT || float_to_bits(weight) != ABSENT) {
          acc[i][0] += weight * v.x;
          acc[i][1] += weight * v.y;
          acc[i][2] += weight * v.z;
          acc[i][3] += weight * v.w;
        }
      }
    }
  }
}

// Maximum and sum over the 16 threads that share a row.
FG_FN float simt_row_max(float x) {
#pragma unroll
  for (int i = 1; i < 16; i *= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, i));
  return x;
}
FG_FN float simt_row_sum(float x) {
#pragma unroll
  for (int i = 1; i < 16; i *= 2) x += __shfl_xor_sync(ALL_LANES, x, i);
  return x;
}

}  // namespace fg
