// Packed sequences: which tiles there are is known on the device alone. A kernel of one block lists them once a call, and the others take their work from the list.
// Include after fg/sm90/ptx.cuh.
#pragma once
#include "fg/base.h"

namespace fg {

struct Packed { Rows rows, keys; };  // where a sequence's queries and keys lie
// A tile: its sequence, and the place in the list of that sequence's first tile; sequence < 0: there is no tile. Here is all that a block must load before it starts.
struct alignas(16) Slot { int sequence, first; Packed at; };

// Sequences of about one cost (within a quarter) share a bucket, the most expensive ones the first.
constexpr int BUCKETS = 128;
FG_FN int bucket_of(int cost) { return BUCKETS - 1 - (cost < 1 ? 0 : (int)(float_to_bits((float)cost) >> 21) - 127 * 4); }

// Lists the tiles of TILE rows (KEYS: keys) of all sequences, those of a costly tile first, which keeps blocks busy to the end: a tile of rows costs what its sequence
// has keys, and the reverse; within a bucket in any order. at(b): where sequence b lies. The list has room for `room` tiles; what is left of it is marked as none.
template <int TILE, bool KEYS, class At> __device__ __forceinline__ void list_tiles(Slot* list, int room, int sequences, At at) {
  __shared__ int place[BUCKETS], all;
  const int lane = threadIdx.x % 32;
  auto tiles = [](const Packed& x) { return ((KEYS ? x.keys : x.rows).count + TILE - 1) / TILE; };
  auto bucket = [](const Packed& x) { return bucket_of((KEYS ? x.rows : x.keys).count); };
  if (threadIdx.x < BUCKETS) place[threadIdx.x] = 0;
  __syncthreads();
  for (int b = threadIdx.x; b < sequences; b += blockDim.x) {
    const Packed own = at(b);
    if (tiles(own) > 0) atomicAdd(&place[bucket(own)], tiles(own));
  }
  __syncthreads();
  int before = 0;
  if (threadIdx.x < BUCKETS) {
#pragma unroll 16
    for (int i = 0; i < BUCKETS; ++i) before += i < threadIdx.x ? place[i] : 0;
  }
  if (threadIdx.x == BUCKETS - 1) all = before + place[BUCKETS - 1];
  __syncthreads();
  if (threadIdx.x < BUCKETS) place[threadIdx.x] = before;
  __syncthreads();
  for (int start = threadIdx.x - lane; start < sequences; start += blockDim.x) {
    const Packed own = start + lane < sequences ? at(start + lane) : Packed{};
    const int count = tiles(own), first = count > 0 ? atomicAdd(&place[bucket(own)], count) : 0;
    for (unsigned lanes = __ballot_sync(0xffffffffu, count > 0); lanes; lanes &= lanes - 1) {  // a sequence at a time, all lanes its tiles
      const int b = start + __ffs(lanes) - 1, many = __shfl_sync(0xffffffffu, count, b), to = __shfl_sync(0xffffffffu, first, b);
      const Slot slot{b, to, at(b)};
      for (int i = to + lane; i < to + many && i < room; i += 32) list[i] = slot;
    }
  }
  for (int i = all + threadIdx.x; i < room; i += blockDim.x) list[i] = Slot{-1};
}

// How many heads take turns so that what they read, bytes_per_head each, stays in L2 together.
FG_FN int heads_together(long long section_bytes, long long bytes_per_head, int heads) {
  return (int)int_max(1ll, int_min(section_bytes / int_max(bytes_per_head, 1ll), (long long)heads));
}

// What belongs to no sequence, the rows from `first` on, is cleared by blocks that share it: `block` of `blocks`. A (rows, heads, DIM) tensor gets zeros,
template <int DIM, class S> __device__ __forceinline__ void clear_rows(S* to, long long stride_l, long long stride_h, int first, int rows, int heads, int block, int blocks) {
  constexpr int CHUNKS = DIM / 8;
  const long long count = (long long)(rows - first) * heads * CHUNKS;
  for (long long i = (long long)block * blockDim.x + threadIdx.x; i < count; i += (long long)blocks * blockDim.x) {
    const long long row = i / (heads * CHUNKS), rest = i % (heads * CHUNKS);
    *reinterpret_cast<uint4*>(to + (first + row) * stride_l + rest / CHUNKS * stride_h + rest % CHUNKS * 8) = make_uint4(0, 0, 0, 0);
  }
}
// and (heads, rows) statistics what stands for no key.
__device__ __forceinline__ void clear_statistics(float* to, long long stride_h, float value, int first, int rows, int heads, int block, int blocks) {
  for (int h = 0; h < heads; ++h)
    for (int q = first + block * blockDim.x + threadIdx.x; q < rows; q += blocks * blockDim.x) to[h * stride_h + q] = value;
}

}  // namespace fg
