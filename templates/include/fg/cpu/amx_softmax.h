// The running softmax in front of a product on tile registers: weights leave as pairs of bfloat16.
#pragma once
#include "fg/cpu/amx.h"
#include "fg/cpu/softmax.h"

namespace fg {

constexpr float REFERENCE_LAG = 8;  // the reference may stay this far (base 2) below the maximum: weights up to 2^8 cost no accuracy

// The largest scores so far of each row, in two chains: a maximum takes four clocks.
template <int VECTORS>
struct Largest {
  vec chain[2][VECTORS];
};

template <int VECTORS>
FG_FN void include_scores(Largest<VECTORS>& largest, const float* scores, int count) {  // count: keys, even
  constexpr int LANES = VECTORS * WIDTH;
  for (int n = 0; n < count; n += 2) {
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) {
      largest.chain[0][j] = larger(load(scores + n * LANES + j * WIDTH), largest.chain[0][j]);
      largest.chain[1][j] = larger(load(scores + (n + 1) * LANES + j * WIDTH), largest.chain[1][j]);
    }
  }
}

// Takes over the maxima; whether one of them, times factor > 0, lies so far above its row's reference that this must follow.
template <int VECTORS>
FG_FN bool left_behind(Softmax<VECTORS>& softmax, const Largest<VECTORS>& largest, float factor) {
  bool behind = false;
#pragma GCC unroll 8
  for (int j = 0; j < VECTORS; ++j) {
    softmax.maximum[j] = larger(largest.chain[0][j], largest.chain[1][j]);
    behind |= any_greater(softmax.maximum[j] * factor, softmax.reference[j] + REFERENCE_LAG);
  }
  return behind;
}

// Makes the reference follow the maximum: totals and the rows of `out` [dim][lane] are scaled to it. After the first tiles that is rare.
template <int DIM, int VECTORS>
FG_FN void raise_reference(Softmax<VECTORS>& softmax, float factor, float* out) {
  constexpr int LANES = VECTORS * WIDTH;
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

// weights[n / 2][lane] = pairs of 2^(scores[n][lane] * factor - reference), for `count` keys (even); sum: of the unrounded weights.
template <int VECTORS>
FG_FN void weigh_pairs(const vec (&reference)[VECTORS], vec (&sum)[VECTORS], const float* scores, int count, float factor, unsigned* weights) {
  constexpr int LANES = VECTORS * WIDTH;
  for (int n = 0; n < count; n += 2) {
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) {
      const vec even = exp2_coarse(load(scores + n * LANES + j * WIDTH) * factor - reference[j]);
      const vec odd = exp2_coarse(load(scores + (n + 1) * LANES + j * WIDTH) * factor - reference[j]);
      sum[j] += even + odd;
      *(pairs*)(weights + n / 2 * LANES + j * WIDTH) = round_to_pairs(even, odd);
    }
  }
}

// Whether a magnitude among the scores of `count` keys (even) exceeds the limit; a NaN does not count.
template <int VECTORS>
FG_FN bool any_beyond(const float* scores, int count, float limit) {
  constexpr int LANES = VECTORS * WIDTH;
  vec largest[2][VECTORS] = {};
  for (int n = 0; n < count; n += 2) {
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) {
      largest[0][j] = larger_magnitude(load(scores + n * LANES + j * WIDTH), largest[0][j]);
      largest[1][j] = larger_magnitude(load(scores + (n + 1) * LANES + j * WIDTH), largest[1][j]);
    }
  }
  vec most{};
#pragma GCC unroll 8
  for (int j = 0; j < VECTORS; ++j) most = larger_magnitude(most, larger_magnitude(largest[0][j], largest[1][j]));
  return any_not_within(most, broadcast(limit));
}

}  // namespace fg
