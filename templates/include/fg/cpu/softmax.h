// The running softmax of a tile of query rows, one row per lane.
#pragma once
#include "fg/cpu/vector.h"

namespace fg {

template <int VECTORS>
struct Softmax {
  vec maximum[VECTORS];    // largest score so far; -inf: none
  vec reference[VECTORS];  // the same in base 2 as it was rounded: weights are exactly 2^(score * log2(e) - reference)
  vec total[VECTORS];      // sum of the weights

  inline __attribute__((always_inline)) void reset() {
    for (int j = 0; j < VECTORS; ++j) {
      maximum[j] = reference[j] = broadcast(-infinity<real>());
      total[j] = vec{};
    }
  }

  // Turns `count` rows of scores [key][lane] into weights; sums of earlier tiles are to be multiplied by decay.
  inline __attribute__((always_inline)) void update(real* scores, int count, vec (&decay)[VECTORS]) {
    vec largest[VECTORS], finite[VECTORS], sum[VECTORS];
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) largest[j] = maximum[j];
    for (int n = 0; n < count; ++n) {
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; ++j) largest[j] = larger(load(scores + (n * VECTORS + j) * WIDTH), largest[j]);
    }
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) {
      maximum[j] = largest[j];
      largest[j] *= real(LOG2E);
      finite[j] = largest[j] == -infinity<real>() ? vec{} : largest[j];  // a row without keys so far: -inf - (-inf) would be NaN
      decay[j] = exp2(reference[j] - finite[j]);
      reference[j] = largest[j];
      sum[j] = vec{};
    }
    for (int n = 0; n < count; ++n) {
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; ++j) {
        real* const at = scores + (n * VECTORS + j) * WIDTH;
        const vec weight = exp2(load(at) * real(LOG2E) - finite[j]);
        store(at, weight);
        sum[j] += weight;
      }
    }
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) total[j] = total[j] * decay[j] + sum[j];
  }
};

}  // namespace fg
