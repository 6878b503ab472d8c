// The softmax of a tile's scores in a thread's registers: wgmma's accumulator, where register 4 j + 2 r + e belongs to the thread's row r = 0, 1.
// The four lanes of a quad share rows; what must be known of a whole row is exchanged among them.
#pragma once
#include "fg/base.h"

namespace fg {

// The reference of a row, which exponents are relative to, may lag behind its maximum by 2^LAG, which spares most rescalings of the outputs; weights then reach 256,
// which 16-bit types hold as exactly as 1. A reference moves when a score reaches the row's threshold: a float, or an integer with the float's bits, since floats
// that are not negative order like integers, and a maximum of three integers is one instruction. ALWAYS is the integer threshold that every score reaches.
constexpr float LAG = 8.0f;
constexpr int ALWAYS = (int)0x80000000;
FG_FN void set_threshold(float& threshold, float reached) { threshold = reached; }
FG_FN void set_threshold(int& threshold, float reached) { threshold = reached >= 0.0f ? __float_as_int(reached) : ALWAYS; }

template <class Threshold> struct OnlineSoftmax {
  float reference[2], offset[2];  // offset: the reference in exponents of two, 0 as long as no key is seen
  float sum[2], factor[2];        // sum: of the thread's own weights; factor: what earlier weights are multiplied by when the reference moves
  Threshold threshold[2];

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      reference[r] = -infinity<float>();
      offset[r] = sum[r] = 0.0f;
      set_threshold(threshold[r], -infinity<float>());
    }
  }

  // Moves the references of rows whose largest score, times multiplier, has left them more than LAG behind.
  template <int N> __device__ __forceinline__ void move(const float (&s)[N], float multiplier) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = reference[r];
#pragma unroll
      for (int i = 2 * r; i < N; i += 4) most = fmaxf(most, fmaxf(s[i], s[i + 1]));
      most = quad_max(most);
      if ((most - reference[r]) * multiplier <= LAG) most = reference[r];
      const float now = most == -infinity<float>() ? 0.0f : most * multiplier;
      factor[r] = approximate_exp2(reference[r] * multiplier - now);
      sum[r] *= factor[r];
      reference[r] = most;
      offset[r] = now;
      set_threshold(threshold[r], most + LAG * approximate_inverse(multiplier));
    }
  }
};

// Whether some score of the warp reaches its row's threshold.
template <int N> FG_FN bool reach(const float (&s)[N], const int (&threshold)[2]) {
  int top[2] = {max(__float_as_int(s[0]), __float_as_int(s[1])), max(__float_as_int(s[2]), __float_as_int(s[3]))};
#pragma unroll
  for (int i = 4; i < N; i += 4)
#pragma unroll
    for (int r = 0; r < 2; ++r) top[r] = __vimax3_s32(top[r], __float_as_int(s[i + 2 * r]), __float_as_int(s[i + 2 * r + 1]));
  return __any_sync(ALL_LANES, top[0] >= threshold[0] || top[1] >= threshold[1]);
}
// The same, and the largest scores are kept.
template <int N> FG_FN bool reach(const float (&s)[N], const float (&threshold)[2], float (&largest)[2]) {
  float top[2] = {-infinity<float>(), -infinity<float>()};
#pragma unroll
  for (int i = 0; i < N; i += 2) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], fmaxf(s[i], s[i + 1]));
#pragma unroll
  for (int r = 0; r < 2; ++r) largest[r] = fmaxf(largest[r], top[r]);
  return __any_sync(ALL_LANES, !(top[0] <= threshold[0] && top[1] <= threshold[1]));
}

// Scores to weights exp2(score * multiplier - offset), in place; sums are of the thread's own weights, and kept: else the compiler adds them up after the last
// exponential instead of among them, where additions cost nothing.
template <int N> FG_FN void exponentiate(float (&s)[N], float multiplier, const float (&offset)[2], float (&sum)[2]) {
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const int r = i / 2 % 2;
    s[i] = approximate_exp2(fmaf(s[i], multiplier, -offset[r]));
    s[i + 1] = approximate_exp2(fmaf(s[i + 1], multiplier, -offset[r]));
    sum[r] += s[i] + s[i + 1];
  }
  keep(sum);
}
template <int N> FG_FN void exponentiate(float (&s)[N], float multiplier, float (&sum)[2]) {
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    s[i] = approximate_exp2(s[i] * multiplier);
    s[i + 1] = approximate_exp2(s[i + 1] * multiplier);
    sum[i / 2 % 2] += s[i] + s[i + 1];
  }
  keep(sum);
}

// How many of a thread's columns (two of eight each, from own_k on) lie before key own_k + distance.
FG_FN int columns_before(int distance) { return max(distance, 0) / 8 * 2 + min(max(distance, 0) % 8, 2); }

// Takes scores of keys outside each row's range away. Bits first, tested in constant places then: an instruction and a half a score.
template <int N> FG_FN void mask_outside(float (&s)[N], const Range (&seen)[2], int own_k) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int begin = columns_before(seen[r].begin - own_k), end = columns_before(seen[r].end - own_k);
#pragma unroll
    for (int word = 0; word < N / 2; word += 32) {
      const unsigned bits = low_bits(end - word) & ~low_bits(begin - word);
#pragma unroll
      for (int j = word; j < word + 32; ++j)
        if (j < N / 2 && !(bits >> (j - word) & 1)) s[j / 2 * 4 + 2 * r + j % 2] = -infinity<float>();
    }
  }
}

// Multiplies the registers of rows 0 and 1.
template <int N> FG_FN void scale_rows(float (&x)[N], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] *= factor[i / 2 % 2];
}

}  // namespace fg
