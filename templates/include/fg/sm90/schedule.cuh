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

// The same, but the first eighth of every head's tiles, under causal masks the shortest, comes after all sections: blocks then end at about the same time.
FG_FN Work nth_longest_shortest_last(int n, int tiles, int heads, int section) {
  const int late = (tiles + 7) / 8, early = (tiles - late) * heads;
  if (n < early) {
    const Work work = nth_longest(n, tiles - late, heads, section);
    return Work{work.tile + late, work.head};
  }
  return Work{late - 1 - (n - early) / heads, (n - early) % heads};
}

}  // namespace fg
