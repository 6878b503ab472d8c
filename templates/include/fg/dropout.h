// Attention dropout: whether an entry of P is kept depends on the seed and its position alone, through Philox4x32-10 (Salmon et al. 2011, "Parallel Random
// Numbers: As Easy as 1, 2, 3"), so that every kernel, tile and chip draws the same bits and a backward draws them again.
#pragma once
#include "fg/base.h"

namespace fg {

struct Dropout {
  unsigned key_low, key_high;  // the seed's halves
  unsigned head;               // b * heads + h
  unsigned most;               // a word up to this one drops its entry
};

constexpr int PHILOX_ROUNDS = 10;
constexpr unsigned PHILOX_KEY_LOW = 0x9E3779B9u, PHILOX_KEY_HIGH = 0xBB67AE85u;  // added to the key after each round

// One round on the counter c, which becomes the words.
FG_FN void philox_round(unsigned& c0, unsigned& c1, unsigned& c2, unsigned& c3, unsigned key_low, unsigned key_high) {
  const unsigned long long a = 0xD2511F53ull * c0, b = 0xCD9E8D57ull * c2;
  c0 = (unsigned)(b >> 32) ^ c1 ^ key_low;
  c1 = (unsigned)b;
  c2 = (unsigned)(a >> 32) ^ c3 ^ key_high;
  c3 = (unsigned)a;
}

// Bit i: whether entry (q, 4 * group + i) is kept.
FG_FN unsigned kept_four(const Dropout& d, int group, int q) {
  unsigned c0 = (unsigned)group, c1 = (unsigned)q, c2 = d.head, c3 = 0;
#if !FG_HOST
#pragma unroll
#endif
  for (unsigned i = 0; i < PHILOX_ROUNDS; ++i) philox_round(c0, c1, c2, c3, d.key_low + i * PHILOX_KEY_LOW, d.key_high + i * PHILOX_KEY_HIGH);
  return (c0 > d.most) | (c1 > d.most) << 1 | (c2 > d.most) << 2 | (c3 > d.most) << 3;
}

FG_FN bool is_kept(const Dropout& d, int q, int k) { return kept_four(d, k / 4, q) >> (k % 4) & 1; }

}  // namespace fg
