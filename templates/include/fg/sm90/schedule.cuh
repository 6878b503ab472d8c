// The order in which tiles of query rows are taken: heads in sections whose keys and values stay in L2 together.
#pragma once
#include "fg/base.h"

namespace fg {

struct Work { int tile, head; };  // head counts over batch * heads

// The n-th piece: in a section the last tile of every head first (under causal masks the longest), then the one before it.
FG_FN Work nth_longest(int n, int tiles, int heads, int section) {
  const int first = n / (section * tiles) * section, rest = n % (section * tiles), here = int_min(section, heads - first);
  return Work{tiles - 1 - rest / here, first + rest % here};
}

}  // namespace fg
