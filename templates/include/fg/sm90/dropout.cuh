// Dropout in the layouts of wgmma's accumulators: scores with rows of queries, register 4 j + 2 r + e (fg/dropout.cuh knows it as M = 1), or of keys.
// Include after fg/sm90/ptx.cuh.
#pragma once
#include "fg/dropout.cuh"

namespace fg {

// The same for all lanes, which the compiler is told by this: the keys of Philox's rounds are then made in uniform registers.
FG_FN Dropout uniform(const Dropout& d) {
  return Dropout{__shfl_sync(ALL_LANES, d.key_low, 0), __shfl_sync(ALL_LANES, d.key_high, 0), __shfl_sync(ALL_LANES, d.head, 0), __shfl_sync(ALL_LANES, d.most, 0)};
}

// Of scores with rows of queries: dropped ones become 0.
template <int N> FG_FN void drop(float (&s)[N], const Dropout& d, int own_row, int first_key) {
  KeptFragments<1, N / 4> kept;
  draw(kept, d, own_row, first_key);
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (!kept.at(i / 2 % 2, i / 4, i % 2)) s[i] = 0.0f;
}

// Kept entries of transposed scores in N registers: register 4 j + 2 r + e is of key first + r * 8 + lane / 4 and query 8 j + lane % 4 * 2 + e. The four lanes whose keys
// one call serves each draw for one (r, e).
template <int N> struct KeptTransposed {
  static constexpr int WORDS = (N / 4 + 7) / 8;
  unsigned bits[4][WORDS];  // of 2 r + e: bit 4 (j % 8)

  __device__ __forceinline__ bool at(int i) const { return bits[i % 4][i / 32] >> (i / 4 % 8 * 4) & 1; }
};

// own_key: of this lane's first key (first + lane / 4, first a multiple of 8); own_query: of its first query.
template <int N> FG_FN void draw(KeptTransposed<N>& kept, const Dropout& d, int own_key, int own_query) {
  const int turn = threadIdx.x % 32 / 4 % 4;  // of the four lanes, and the lane's key among the four
#pragma unroll
  for (int word = 0; word < KeptTransposed<N>::WORDS; ++word) {
    constexpr int STEPS = N / 4 < 8 ? N / 4 : 8;
    unsigned drawn = 0;
#pragma unroll 2
    for (int j = 0; j < STEPS; ++j) drawn |= kept_four(d, own_key / 4 + turn / 2 * 2, own_query + (word * 8 + j) * 8 + turn % 2) << 4 * j;
#pragma unroll
    for (int i = 0; i < 4; ++i) kept.bits[i][word] = __shfl_sync(ALL_LANES, drawn, (threadIdx.x & ~12) % 32 + 4 * i) >> turn;
  }
}

}  // namespace fg
