// Which work a block takes: heads in sections whose keys and values stay in L2 together, the last tile (under causal masks the longest) of every head first.
#pragma once
#include "fg/sm80/ptx.cuh"

namespace fg {

struct Work { int tile, head; };  // head counts over batch * heads

FG_FN Work work_of_block(unsigned block, int tiles, int heads, long long bytes_per_head, int section_bytes) {
  const long long fitting = section_bytes / (bytes_per_head > 0 ? bytes_per_head : 1);
  const unsigned section = fitting < 1 ? 1 : fitting < heads ? (unsigned)fitting : (unsigned)heads;
  const unsigned first = block / (section * tiles) * section, rest = block % (section * tiles);
  const unsigned here = heads - first < section ? heads - first : section;
  return Work{same_in_warp(tiles - 1 - (int)(rest / here)), same_in_warp((int)(first + rest % here))};
}

}  // namespace fg
