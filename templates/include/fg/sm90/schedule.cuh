// The order in which tiles of query rows are taken: heads in sections whose keys and values stay in L2 together.
#pragma once
#include "fg/base.h"

namespace fg {

struct Work { int tile, head; };  // head counts over batch * heads

// Heads of a section.
FG_FN int section_heads(int heads, long long bytes_per_head, int section_bytes) {
  const long long fitting = section_bytes / int_max(bytes_per_head, 1ll);
  return (int)int_max(1ll, int_min(fitting, (long long)heads));
}

// The n-th piece: in a section the last tile of every head first (under causal masks the longest), then the one before it.
FG_FN Work nth_longest(int n, int tiles, int heads, int section) {
  const int first = n / (section * tiles) * section, rest = n % (section * tiles), here = int_min(section, heads - first);
  return Work{tiles - 1 - rest / here, first + rest % here};
}

}  // namespace fg
