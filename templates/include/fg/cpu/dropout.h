// Dropout with one query row per lane.
#pragma once
#include "fg/cpu/vector.h"
#include "fg/dropout.h"

namespace fg {

// words[i][lane]: that of entry (q_first + lane, 4 * group + i). Rounds are loops over lanes, which compilers make vectors of.
template <int LANES>
FG_FN void draw_four(const Dropout& d, int group, int q_first, unsigned (&words)[4][LANES]) {
  for (int lane = 0; lane < LANES; ++lane) {
    words[0][lane] = (unsigned)group;
    words[1][lane] = (unsigned)(q_first + lane);
    words[2][lane] = d.head;
    words[3][lane] = 0;
  }
  for (unsigned i = 0; i < PHILOX_ROUNDS; ++i) {
    const unsigned key_low = d.key_low + i * PHILOX_KEY_LOW, key_high = d.key_high + i * PHILOX_KEY_HIGH;
    for (int lane = 0; lane < LANES; ++lane) philox_round(words[0][lane], words[1][lane], words[2][lane], words[3][lane], key_low, key_high);
  }
}

// Weights [key][lane] of keys k_first .. k_first + count - 1 that are dropped become 0.
template <int LANES>
FG_FN void drop_weights(const Dropout& d, int k_first, int count, int q_first, real* weights) {
  for (int n = -(k_first % 4); n < count; n += 4) {
    alignas(64) unsigned words[4][LANES];
    draw_four(d, (k_first + n) / 4, q_first, words);
    for (int i = int_max(0, -n); i < 4 && n + i < count; ++i) {
      real* __restrict const weight = weights + (n + i) * LANES;
      for (int lane = 0; lane < LANES; ++lane) weight[lane] = words[i][lane] > d.most ? weight[lane] : real(0);
    }
  }
}

// The same for pairs of bfloat16 weights [key / 2][lane]; k_first and room are multiples of 4.
template <int LANES>
FG_FN void drop_pairs(const Dropout& d, int k_first, int room, int q_first, unsigned* weights) {
  for (int n = 0; n < room; n += 4) {
    alignas(64) unsigned words[4][LANES];
    draw_four(d, (k_first + n) / 4, q_first, words);
    for (int i = 0; i < 4; i += 2) {
      unsigned* __restrict const pair = weights + (n + i) / 2 * LANES;
      for (int lane = 0; lane < LANES; ++lane) pair[lane] &= (words[i][lane] > d.most ? 0xffffu : 0u) | (words[i + 1][lane] > d.most ? 0xffff0000u : 0u);
    }
  }
}

}  // namespace fg
