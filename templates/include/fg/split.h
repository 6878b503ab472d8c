// Splitting the keys that a tile of rows sees among several blocks or tasks, whose outputs are combined afterwards.
#pragma once
#include "fg/base.h"

namespace fg {

// The keys that split number `split` of `splits` attends to: whole tiles of BLOCK_KV, in shares as equal as they come.
template <int BLOCK_KV> FG_FN Range share_of(Range seen, int split, int splits) {
  const int first = seen.begin / BLOCK_KV, tiles = int_max(0, (seen.end + BLOCK_KV - 1) / BLOCK_KV - first), each = (tiles + splits - 1) / splits;
  const int begin = first + int_min(split * each, tiles), end = first + int_min((split + 1) * each, tiles);
  return Range{int_max(seen.begin, begin * BLOCK_KV), int_min(seen.end, end * BLOCK_KV)};
}

}  // namespace fg
