// The running softmax of a tile of query rows, one row per lane.
#pragma once
#include "fg/cpu/vector.h"

namespace fg {

// A row without keys so far has the reference -inf; 0 in its place keeps -inf - (-inf) from being NaN.
FG_FN vec finite_reference(vec reference) { return reference == -infinity<real>() ? vec{} : reference; }

template <int VECTORS>
struct Softmax {
  vec maximum[VECTORS];    // largest score so far; -inf: none
  vec reference[VECTORS];  // about the same in base 2, -inf likewise; whatever it is, weights are exactly 2^(score * log2(e) - reference)
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
      finite[j] = finite_reference(largest[j]);
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
