// Packed sequences: which tiles there are is known on the device alone. A kernel of one block lists them once a call, and the others take their work from the list.
#pragma once
#include "fg/base.h"

namespace fg {

struct Slot { int sequence, first; };  // of a tile: its sequence, and the place in the list of that sequence's first tile; sequence < 0: there is no tile

// Sequences of about one cost (within a quarter) share a bucket, the most expensive ones the first.
constexpr int BUCKETS = 128;
FG_FN int bucket_of(int cost) { return BUCKETS - 1 - (cost < 1 ? 0 : (int)(float_to_bits((float)cost) >> 21) - 127 * 4); }

// Lists the tiles of all sequences, those of a costly tile first, which keeps blocks busy to the end; within a bucket in any order. tiles(b), cost(b): how many tiles
// sequence b has, and what one of them costs. The list has room for `room` tiles; what is left of it is marked as none.
template <class Tiles, class Cost> __device__ __forceinline__ void list_tiles(Slot* list, int room, int sequences, Tiles tiles, Cost cost) {
  __shared__ int place[BUCKETS], all;
  const int lane = threadIdx.x % 32;
  if (threadIdx.x < BUCKETS) place[threadIdx.x] = 0;
  __syncthreads();
  for (int b = threadIdx.x; b < sequences; b += blockDim.x)
    if (tiles(b) > 0) atomicAdd(&place[bucket_of(cost(b))], tiles(b));
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
    const int count = start + lane < sequences ? tiles(start + lane) : 0;
    const int first = count > 0 ? atomicAdd(&place[bucket_of(cost(start + lane))], count) : 0;
    for (unsigned lanes = __ballot_sync(0xffffffffu, count > 0); lanes; lanes &= lanes - 1) {
      const int source = __ffs(lanes) - 1, many = __shfl_sync(0xffffffffu, count, source), to = __shfl_sync(0xffffffffu, first, source);
      for (int i = to + lane; i < to + many && i < room; i += 32) list[i] = Slot{start + source, to};
    }
  }
  for (int i = all + threadIdx.x; i < room; i += blockDim.x) list[i] = Slot{-1, 0};
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
