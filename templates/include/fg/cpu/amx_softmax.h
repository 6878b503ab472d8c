// The running softmax in front of a product on tile registers: weights leave as pairs of bfloat16.
#pragma once
#include "fg/cpu/amx.h"
#include "fg/cpu/softmax.h"

namespace fg {

constexpr float REFERENCE_LAG = 8;  // the reference may stay this far (base 2) below the maximum: weights up to 2^8 cost no accuracy

// Makes the reference follow the maximum of scores[n][lane] * factor, for `count` keys (a multiple of 4), factor > 0. Where it moves, the rows of
// `out` [dim][lane] and the totals are scaled to it: after the first tiles that is rare.
template <int DIM, int VECTORS>
FG_FN void raise_reference(Softmax<VECTORS>& softmax, const float* scores, int count, float factor, float* out) {
  constexpr int LANES = VECTORS * WIDTH, CHAINS = 4;  // several chains: a maximum takes four clocks
  vec largest[CHAINS][VECTORS];
#pragma GCC unroll 4
  for (int i = 0; i < CHAINS; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) largest[i][j] = softmax.maximum[j];
  }
  for (int n = 0; n < count; n += CHAINS) {
#pragma GCC unroll 4
    for (int i = 0; i < CHAINS; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; ++j) largest[i][j] = larger(load(scores + (n + i) * LANES + j * WIDTH), largest[i][j]);
    }
  }
  bool behind = false;
#pragma GCC unroll 8
  for (int j = 0; j < VECTORS; ++j) {
    softmax.maximum[j] = larger(larger(largest[0][j], largest[1][j]), larger(largest[2][j], largest[3][j]));
    behind |= any_greater(softmax.maximum[j] * factor, softmax.reference[j] + REFERENCE_LAG);
  }
  if (!behind) return;
  vec decay[VECTORS];
#pragma GCC unroll 8
  for (int j = 0; j < VECTORS; ++j) {
    const vec next = larger(softmax.maximum[j] * factor, softmax.reference[j]);
    decay[j] = fg::exp2(softmax.reference[j] - finite_reference(next));
    softmax.reference[j] = next;
    softmax.total[j] *= decay[j];
  }
  for (int d = 0; d < DIM; ++d) {
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) store(out + d * LANES + j * WIDTH, load(out + d * LANES + j * WIDTH) * decay[j]);
  }
}

// weights[n / 2][lane] = pairs of 2^(scores[n][lane] * factor - reference), for 32 keys.
template <int VECTORS>
FG_FN void weigh_pairs(Softmax<VECTORS>& softmax, const float* scores, float factor, unsigned* weights) {
  constexpr int LANES = VECTORS * WIDTH;
  vec reference[VECTORS], sum[VECTORS];
#pragma GCC unroll 8
  for (int j = 0; j < VECTORS; ++j) {
    reference[j] = finite_reference(softmax.reference[j]);
    sum[j] = vec{};
  }
  for (int n = 0; n < 32; n += 2) {
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) {
      const vec even = exp2_coarse(load(scores + n * LANES + j * WIDTH) * factor - reference[j]);
      const vec odd = exp2_coarse(load(scores + (n + 1) * LANES + j * WIDTH) * factor - reference[j]);
      sum[j] += even + odd;
      *(pairs*)(weights + n / 2 * LANES + j * WIDTH) = round_to_pairs(even, odd);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < VECTORS; ++j) softmax.total[j] += sum[j];
}

}  // namespace fg
