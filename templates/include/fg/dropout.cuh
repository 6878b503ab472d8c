// Dropout in the layout of tensor-core accumulators. One Philox call serves four neighbouring keys of a row, which several lanes share: each draws for some of their
// rows and the bits are exchanged. All lanes of a warp call these together.
#pragma once
#include "fg/dropout.h"

namespace fg {

// Kept entries of acc[M][N][4] in mma's layout: row m * 16 + e / 2 * 8 + lane / 4, column n * 8 + lane % 4 * 2 + e % 2.
template <int M, int N>
struct KeptFragments {
  static constexpr int WORDS = (N + 7) / 8;
  unsigned bits[2 * M][WORDS];  // of row r = 2 m + e / 2: bit 4 (n % 8) + e % 2

  __device__ __forceinline__ bool at(int r, int n, int e) const { return bits[r][n / 8] >> (n % 8 * 4 + e) & 1; }
};

// own_row: of this lane's first row (first + lane / 4); first_key: a multiple of 8.
template <int M, int N>
FG_FN void draw(KeptFragments<M, N>& kept, const Dropout& d, int own_row, int first_key) {
  // Two neighbouring lanes see the same four keys: the even one draws for the upper row of each fragment, the odd one for the lower.
  const int lane = threadIdx.x % 32, odd = lane & 1, group = first_key / 4 + lane % 4 / 2;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int word = 0; word < KeptFragments<M, N>::WORDS; ++word) {
      constexpr int STEPS = N < 8 ? N : 8;
      unsigned drawn = 0;
#pragma unroll 2
      for (int n = 0; n < STEPS; ++n) drawn |= kept_four(d, group + (word * 8 + n) * 2, own_row + m * 16 + odd * 8) << 4 * n;
      const unsigned received = __shfl_xor_sync(0xffffffffu, drawn, 1);
      kept.bits[2 * m][word] = (odd ? received : drawn) >> 2 * odd;
      kept.bits[2 * m + 1][word] = (odd ? drawn : received) >> 2 * odd;
    }
}

}  // namespace fg
