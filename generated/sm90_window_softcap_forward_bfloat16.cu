// Attention forward written by flashgen: sm90a, bfloat16, head dims 128/128, family sm90, 2 query heads per kv head.
// Keys of a row: k <= q + kv_len - q_len and k >= q + kv_len - q_len - int_0 and k <= q + kv_len + int_1 - q_len.
// Tiles are empty, full or partial by interval evaluation.
// Score: a general function of s, 3 operations per pair, 0 of them loads.

#include "fg/base.h"
#include "fg/interval.h"

using real = float;        // scores, statistics, captured floats
using T = fg::bf16;  // q, k, v, out

constexpr int HEAD_DIM_QK = 128;
constexpr int HEAD_DIM_V = 128;
constexpr int GROUP = 2;  // query heads per kv head
constexpr int AHEAD = 1;
constexpr int BLOCK_KV = 64;
constexpr int BLOCK_Q = 192;
constexpr int COLUMNS_QK = 64;
constexpr int COLUMNS_V = 64;
constexpr int CONSUMER_REGISTERS = 160;
constexpr int CONSUMERS = 3;
constexpr int DIM_QK = 128;
constexpr int DIM_V = 128;
constexpr int EARLY_KEYS = 1;
constexpr int HOLES = 1;
constexpr int MASK_BITS = 0;
constexpr int OUT_REGISTERS = 64;
constexpr int PRODUCER_REGISTERS = 32;
constexpr int Q_STAGES = 1;
constexpr int SCANNED = 0;
constexpr int SCHEDULE = 2;
constexpr int SCORE_REGISTERS = 32;
constexpr int SECTION_BYTES = 16777216;
constexpr int SHORTEST_LAST = 0;
constexpr int SMEM_BYTES = 197632;
constexpr int SMS = 132;
constexpr int STAGES = 3;
constexpr int STAGGER = 0;
constexpr int STORE_REGISTERS = 0;

#include "fg/math.cuh"
#include "fg/sm90/layout.cuh"
#include "fg/sm90/ptx.cuh"
#include "fg/sm90/schedule.cuh"
#include "fg/sm90/softmax.cuh"

// d (64 x 64) = a b, or += with `accumulate`: both operands in shared memory, their rows along the depth of the product.
__device__ __forceinline__ void multiply_scores(float (&d)[32], fg::Descriptor a, fg::Descriptor b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, p, 1, 1, 0, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(accumulate));
}

// d (64 x 128) += a b: a in registers, b in shared memory, the depth of the product down its rows.
__device__ __forceinline__ void multiply_out(float (&d)[64], unsigned a0, unsigned a1, unsigned a2, unsigned a3, fg::Descriptor b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, { %64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

struct Params {
  fg::TensorMap map_q;
  fg::TensorMap map_k;
  fg::TensorMap map_v;
  fg::TensorMap map_out;
  const T* q;
  const T* k;
  const T* v;
  T* out;
  real* lse;
  int* counter;
  long long q_stride_b;
  long long q_stride_h;
  long long q_stride_l;
  long long k_stride_b;
  long long k_stride_h;
  long long k_stride_l;
  long long v_stride_b;
  long long v_stride_h;
  long long v_stride_l;
  long long out_stride_b;
  long long out_stride_h;
  long long out_stride_l;
  long long lse_stride_b;
  long long lse_stride_h;
  int batch;
  int heads;
  int kv_heads;
  int q_len;
  int kv_len;
  int int_0;
  int int_1;
  float scale;
  float float_0;
  float float_1;
  int q_tiles;
  int pieces;
  int section;
};

struct Lens { int q_len, kv_len; };
struct Item { long long q_start, k_start; Lens lens; };  // rows of a batch item within its tensors, and its lengths

FG_FN Item item(const Params& p, int b) {
  return Item{0, 0, Lens{p.q_len, p.kv_len}};
}

// The variant: what depends on the head alone, on the row, on the key, and the rest per score.
struct Uniform {
  Lens lens;
  int b, h;
  real u0;
  int u1;
};

struct Row {
  int r0;
  int r1;
  int r2;
};

struct Col {
};

FG_FN Uniform uniform(const Params& p, Lens lens, int b, int h) {
  Uniform u;
  u.lens = lens;
  u.b = b;
  u.h = h;
  u.u0 = fg::divide(1.0f, p.float_1) * p.scale;
  u.u1 = u.lens.kv_len - u.lens.q_len;
  return u;
}

FG_FN Row row(const Params& p, const Uniform& u, int q) {
  Row r{};
  const int t0 = q + u.u1;
  r.r0 = t0;
  r.r1 = t0 - p.int_0;
  r.r2 = t0 + p.int_1;
  return r;
}

FG_FN Col col(const Params& p, const Uniform& u, int k) {
  Col c{};
  return c;
}

// what score() is still to be multiplied by
FG_FN real gain(const Params& p, const Uniform& u) {
  return p.float_0;
}

// s is q . k; q - k is d + step, where step is a number in an unrolled loop
FG_FN real score(const Params& p, const Uniform& u, const Row& r, const Col& c, real s, int q, int k, int d, int step) {
  return fg::tanh(s * u.u0);
}

FG_FN bool mask(const Params& p, const Uniform& u, const Row& r, const Col& c, int q, int k) {
  return (k <= r.r0) & (k >= r.r1) & (k <= r.r2);
}

// the keys that row q sees, all between the two; none if begin >= end
FG_FN fg::Range visible(const Params& p, const Uniform& u, const Row& r, int q) {
  int begin = 0, end = u.lens.kv_len;
  end = fg::int_min(end, fg::int_min(r.r0, u.lens.kv_len - 1) + 1);
  begin = fg::int_max(begin, r.r1);
  end = fg::int_min(end, fg::int_min(r.r2, u.lens.kv_len - 1) + 1);
  return fg::Range{begin, fg::int_max(end, 0)};
}

// EMPTY, PARTIAL or FULL: the mask over a tile of rows and keys, both ends inclusive
FG_FN int tile_class(const Params& p, const Uniform& u, int q_first, int q_last, int k_first, int k_last) {
  const auto r0 = fg::span_sub(fg::Span{u.lens.kv_len, u.lens.kv_len}, fg::Span{u.lens.q_len, u.lens.q_len});
  const auto r1 = fg::span_add(fg::Span{q_first, q_last}, r0);
  const auto r2 = fg::truth_le(fg::Span{k_first, k_last}, r1);
  const auto r3 = fg::span_sub(r1, fg::Span{p.int_0, p.int_0});
  const auto r4 = fg::truth_le(r3, fg::Span{k_first, k_last});
  const auto r5 = fg::span_add(r1, fg::Span{p.int_1, p.int_1});
  const auto r6 = fg::truth_le(fg::Span{k_first, k_last}, r5);
  const auto r7 = fg::truth_and(r4, r6);
  const auto r8 = fg::truth_and(r2, r7);
  return r8.must ? fg::FULL : r8.may ? fg::PARTIAL : fg::EMPTY;
}

// keys that rows q_first..q_last can see
FG_FN fg::Range kv_range(const Params& p, const Uniform& u, int q_first, int q_last) {
  const auto r0 = fg::span_add(fg::Span{u.lens.kv_len, u.lens.kv_len}, fg::Span{q_first, q_last});
  const auto r1 = fg::span_sub(r0, fg::Span{u.lens.q_len, u.lens.q_len});
  const auto r2 = fg::span_below(r1);
  const auto r3 = fg::span_sub(r0, fg::Span{p.int_0, p.int_0});
  const auto r4 = fg::span_sub(r3, fg::Span{u.lens.q_len, u.lens.q_len});
  const auto r5 = fg::span_above(r4);
  const auto r6 = fg::span_meet(r2, r5);
  const auto r7 = fg::span_add(fg::Span{p.int_1, p.int_1}, fg::Span{u.lens.kv_len, u.lens.kv_len});
  const auto r8 = fg::span_add(r7, fg::Span{q_first, q_last});
  const auto r9 = fg::span_sub(r8, fg::Span{u.lens.q_len, u.lens.q_len});
  const auto r10 = fg::span_below(r9);
  const auto r11 = fg::span_meet(r6, r10);
  return fg::range_within(r11, u.lens.kv_len);
}

// rows that keys k_first..k_last can be seen by
FG_FN fg::Range q_range(const Params& p, const Uniform& u, int k_first, int k_last) {
  const auto r0 = fg::span_add(fg::Span{u.lens.q_len, u.lens.q_len}, fg::Span{k_first, k_last});
  const auto r1 = fg::span_sub(r0, fg::Span{u.lens.kv_len, u.lens.kv_len});
  const auto r2 = fg::span_above(r1);
  const auto r3 = fg::span_add(fg::Span{p.int_0, p.int_0}, fg::Span{u.lens.q_len, u.lens.q_len});
  const auto r4 = fg::span_add(r3, fg::Span{k_first, k_last});
  const auto r5 = fg::span_sub(r4, fg::Span{u.lens.kv_len, u.lens.kv_len});
  const auto r6 = fg::span_below(r5);
  const auto r7 = fg::span_meet(r2, r6);
  const auto r8 = fg::span_sub(r0, fg::Span{p.int_1, p.int_1});
  const auto r9 = fg::span_sub(r8, fg::Span{u.lens.kv_len, u.lens.kv_len});
  const auto r10 = fg::span_above(r9);
  const auto r11 = fg::span_meet(r7, r10);
  return fg::range_within(r11, u.lens.q_len);
}

// A block takes tiles of BLOCK_Q query rows of one head, one after the other, and walks through the keys in tiles of BLOCK_KV, the last ones first.
// Warpgroup 0 is the producer: its first warp chooses the tiles and loads them by TMA. Warpgroups 1 .. CONSUMERS are the consumers: 64 rows each, for all keys.
// Glossary:
//   b, h               batch item and query head; the kv head is h / GROUP
//   s[4 j + 2 r + e]   score of row r * 8 + g of the warp's 16 and column 8 j + 2 c + e, with g = lane / 4, c = lane % 4: wgmma's accumulator; o likewise.
//                      The four lanes of a quad share a thread's two rows r = 0, 1
//   weights            probabilities as the next product's operand: pairs of s, in place
//   sum[r]             of the weights exp2(score * multiplier) of a row: no score is so large or small that they need a reference
// A step starts the scores of one tile, then o += weights v of the tile before it, and runs the softmax while the latter is in flight.
// Barriers (full: the TMA's bytes and the producer's arrival; empty: lane 0 of each consumer warp):
//   q_full, q_empty    a piece of work: its queries and its description `work`; the queries' slot is free again when the last scores are computed
//   k_full, k_empty    a tile of keys, and in `next_tiles` the description of the tile after it. Descriptions, also `work`, arrive on their own: they are found while TMA copies
//   v_full, v_empty    a tile of values; consumers use one Ring for both, since a tile's keys and values take the same slot
// Whoever fills waits for "empty" with the parity of the round before (a fresh barrier lets it pass), whoever reads waits for "full" with that of this round.

constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int SCORES = SCORE_REGISTERS, OUTS = OUT_REGISTERS, WEIGHTS = SCORES / 2;  // registers of a thread
constexpr int GROUP_BARRIER = 1;    // named barriers: one for each consumer warpgroup
struct Piece { int b, h, q_first, tile; };  // what a block works on, down from `tile` of the keys; tile < 0: none is seen; b < 0: no more work
__device__ __forceinline__ Piece read_piece(const Piece& x) { return Piece{fg::shared_int(x.b), fg::shared_int(x.h), fg::shared_int(x.q_first), fg::shared_int(x.tile)}; }
// Tiles are described as tile << KIND_BITS | kinds, where bits 2 g, 2 g + 1 are the class under the mask of warpgroup g's rows.
constexpr int KIND_BITS = 2 * CONSUMERS, EACH_GROUP = ((1 << KIND_BITS) - 1) / 3;
struct alignas(1024) Smem {
  T q[Q_STAGES][BLOCK_Q * DIM_QK];
  T k[STAGES][BLOCK_KV * DIM_QK];
  T v[STAGES][BLOCK_KV * DIM_V];
  T out[BLOCK_Q * DIM_V];
  fg::Barrier q_full[Q_STAGES], q_empty[Q_STAGES], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
  Piece work[Q_STAGES];
  int next_tiles[STAGES];
};
static_assert(sizeof(Smem) == SMEM_BYTES, "tiler and kernel disagree");

// P V has no notion of a masked key: 0 * NaN is NaN. Such output rows are rare and recognised afterwards; this computes one of them exactly, with one warp, and
// gives column d to store(d, value).
template <class Store> __device__ __forceinline__ void repair_row(const Params& p, const Uniform& u, int b, int h, int q, float multiplier, float offset, float factor, Store store) {
  constexpr int STEPS = (HEAD_DIM_V + 31) / 32;
  const int lane = threadIdx.x % 32;
  const T* const query = p.q + b * p.q_stride_b + h * p.q_stride_h + q * p.q_stride_l;
  const T* const keys = p.k + b * p.k_stride_b + h / GROUP * p.k_stride_h;
  const T* const values = p.v + b * p.v_stride_b + h / GROUP * p.v_stride_h;
  const Row row_q = row(p, u, q);
  const fg::Range seen = kv_range(p, u, q, q);
  float out[STEPS] = {};
#pragma unroll 1
  for (int k = seen.begin; k < seen.end; ++k) {
    const Col col_k = col(p, u, k);
    if (!mask(p, u, row_q, col_k, q, k)) continue;
    float s = 0.0f;
#pragma unroll 1
    for (int d = lane; d < HEAD_DIM_QK; d += 32) s += fg::to_real(query[d]) * fg::to_real(keys[k * p.k_stride_l + d]);
    s = fg::warp_sum(s);
    s = score(p, u, row_q, col_k, s, q, k, q - k, 0);
    const float weight = fg::approximate_exp2(s * multiplier - offset);
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const int d = i * 32 + lane;
      if (d < HEAD_DIM_V) out[i] += weight * fg::to_real(values[k * p.v_stride_l + d]);
    }
  }
#pragma unroll
  for (int i = 0; i < STEPS; ++i)
    if (i * 32 + lane < HEAD_DIM_V) store(i * 32 + lane, out[i] * factor);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int group = __shfl_sync(fg::ALL_LANES, threadIdx.x / 128, 0) - 1, warp = __shfl_sync(fg::ALL_LANES, threadIdx.x / 32 % 4, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Q_STAGES; ++i) {
      fg::barrier_init(smem.q_full[i], 2);
      fg::barrier_init(smem.q_empty[i], CONSUMERS * 4);
    }
    for (int i = 0; i < STAGES; ++i) {
      fg::barrier_init(smem.k_full[i], 2);
      fg::barrier_init(smem.v_full[i], 1);
      fg::barrier_init(smem.k_empty[i], CONSUMERS * 4);
      fg::barrier_init(smem.v_empty[i], CONSUMERS * 4);
    }
    fg::barrier_init_fence();
  }
  __syncthreads();

  if (group < 0) {  // ---------------------------------------------------------------------------------------------------------------- producer
    fg::registers_lower<PRODUCER_REGISTERS>();
    if (warp > 0) return;
    // A stride of 0 (one key for all batch items or heads) is none that a tensor map can have: it holds the one, and is asked for that.
    auto entry = [](int index, long long stride) { return stride != 0 ? index : 0; };
    fg::Ring<Q_STAGES> q_ring;
    fg::Ring<STAGES> k_ring, v_ring;
    unsigned described = 0;  // the slot of the last keys, whose next tile is not described yet
    int n = blockIdx.x;
    int drawn = 0;
#pragma unroll 1
    while (n < p.pieces) {
      const fg::Work work = fg::nth_longest(n, p.q_tiles, p.batch * p.heads, p.section);
      const int b = work.head / p.heads, h = work.head - b * p.heads, q_first = work.tile * BLOCK_Q;
      const Lens lens = item(p, b).lens;
      const int kv_len = lens.kv_len;
      const Uniform u = uniform(p, lens, b, h);
      const int q_last = min(q_first + BLOCK_Q, lens.q_len) - 1;
      const fg::Range seen = kv_range(p, u, q_first, q_last);
      const int first = seen.begin / BLOCK_KV;
      const int last = (seen.end + BLOCK_KV - 1) / BLOCK_KV - 1;
      // The mask over eight tiles at once: lane 4 j + g has the rows of group g and tile above - 1 - j; lane 3 has all rows and all tiles below those eight.
      int above = 0x7fffffff;
      unsigned some = 0, full = 0;  // bit 4 j + g: not all of it is masked, none of it is
      auto classify = [&]() {
        const int tile = above - 1 - lane / 4, g = lane % 4;
        const bool rest = g == 3;
        const int q_from = rest ? q_first : q_first + 64 * g, q_to = rest ? q_last : min(q_from + 63, q_last);
        const int k_from = (rest ? first : tile) * BLOCK_KV, k_to = rest ? (above - 8) * BLOCK_KV : min(k_from + BLOCK_KV, kv_len);
        const bool wanted = (rest ? lane == 3 && above - 8 > first : g < CONSUMERS && tile >= first) && q_from <= q_to;
        const int kind = wanted ? tile_class(p, u, q_from, q_to, k_from, k_to - 1) : fg::EMPTY;
        some = __ballot_sync(fg::ALL_LANES, kind != fg::EMPTY);
        full = __ballot_sync(fg::ALL_LANES, kind == fg::FULL && (rest || k_from + BLOCK_KV <= kv_len));
      };
      // The next tile below `tile` that holds a visible key, described; -1 if there is none. The last tile, loaded before anything is known of it, counts.
      auto next_below = [&](int tile) {
#pragma unroll 1
        while (--tile >= first) {
          if (tile < above - 8 && full >> 3 & 1) return tile << KIND_BITS | fg::FULL * EACH_GROUP;
          if (tile >= above || tile < above - 8) {
            above = tile + 1;
            classify();
          }
          const int at = (above - 1 - tile) * 4;
          if ((some >> at & 7) == 0 && tile < last) continue;
          int described = tile;
#pragma unroll
          for (int g = CONSUMERS - 1; g >= 0; --g) described = described << 2 | (full >> (at + g) & 1 ? fg::FULL : some >> (at + g) & 1 ? fg::PARTIAL : fg::EMPTY);
          return described;
        }
        return -1;
      };
      auto load_keys = [&](int tile) {
        fg::barrier_wait(smem.k_empty[k_ring.slot], k_ring.parity ^ 1);
        if (lane == 0) {
          fg::barrier_expect(smem.k_full[k_ring.slot], sizeof(smem.k[0]));
#pragma unroll
          for (int d = 0; d < DIM_QK; d += COLUMNS_QK)
            fg::tma_load(smem.k[k_ring.slot] + d * BLOCK_KV, p.map_k, smem.k_full[k_ring.slot], d, tile * BLOCK_KV, entry(h / GROUP, p.k_stride_h), entry(b, p.k_stride_b), fg::READ_AGAIN);
        }
        described = k_ring.slot;
        k_ring.advance();
      };
      auto load_values = [&](int tile) {
        fg::barrier_wait(smem.v_empty[v_ring.slot], v_ring.parity ^ 1);
        if (lane == 0) {
          fg::barrier_expect(smem.v_full[v_ring.slot], sizeof(smem.v[0]));
#pragma unroll
          for (int d = 0; d < DIM_V; d += COLUMNS_V)
            fg::tma_load(smem.v[v_ring.slot] + d * BLOCK_KV, p.map_v, smem.v_full[v_ring.slot], d, tile * BLOCK_KV, entry(h / GROUP, p.v_stride_h), entry(b, p.v_stride_b), fg::READ_AGAIN);
        }
        v_ring.advance();
      };
      auto load_queries = [&](bool some) {
        fg::barrier_wait(smem.q_empty[q_ring.slot], q_ring.parity ^ 1);
        if (lane == 0) {
          if (some) {
            fg::barrier_expect(smem.q_full[q_ring.slot], sizeof(smem.q[0]));
#pragma unroll
            for (int d = 0; d < DIM_QK; d += COLUMNS_QK)
              fg::tma_load(smem.q[q_ring.slot] + d * BLOCK_Q, p.map_q, smem.q_full[q_ring.slot], d, q_first, entry(h, p.q_stride_h), entry(b, p.q_stride_b), fg::READ_ONCE);
          } else {
            fg::barrier_arrive(smem.q_full[q_ring.slot]);
          }
        }
      };

      // Keys run a tile ahead of values; the first ones come before the queries, whose slot is freed later.
      // Says which tile follows one whose keys are on their way: before anything that may have to wait, as a consumer that is ahead of the others needs it.
      auto announce = [&](int tile) {
        const int next = next_below(tile >> KIND_BITS);
        if (lane == 0) {
          smem.next_tiles[described] = next;
          fg::barrier_arrive(smem.k_full[described]);
        }
        return next;
      };

      const bool some_seen = seen.begin < seen.end;
      if (some_seen) load_keys(last);
      int tile = some_seen ? next_below(last + 1) : -1;
      int next = some_seen ? announce(tile) : -1;
      load_queries(some_seen);
      if (lane == 0) drawn = atomicAdd(p.counter, 1);  // looked at when this piece is done
      if (lane == 0) {
        smem.work[q_ring.slot] = Piece{b, h, q_first, tile};
        fg::barrier_arrive(smem.q_full[q_ring.slot]);
      }
      q_ring.advance();
      int waiting = -1;  // the tile whose keys are on their way and whose values are not
#pragma unroll 1
      while (tile >= 0) {
        if (waiting >= 0) load_values(waiting);
        if (next >= 0) load_keys(next >> KIND_BITS);
        waiting = tile >> KIND_BITS;
        tile = next;
        if (tile >= 0) next = announce(tile);
      }
      if (waiting >= 0) load_values(waiting);
      n = gridDim.x + __shfl_sync(fg::ALL_LANES, drawn, 0);
    }
    fg::barrier_wait(smem.q_empty[q_ring.slot], q_ring.parity ^ 1);
    if (lane == 0) {
      smem.work[q_ring.slot] = Piece{-1};
      fg::barrier_arrive(smem.q_full[q_ring.slot]);
      fg::barrier_arrive(smem.q_full[q_ring.slot]);
      __threadfence();
      if (atomicAdd(p.counter + 1, 1) == gridDim.x - 1) p.counter[0] = p.counter[1] = 0;  // the last block leaves it as it was found
    }
    return;
  }

  // ------------------------------------------------------------------------------------------------------------------------------ consumers
  fg::registers_raise<CONSUMER_REGISTERS>();
  float s[SCORES], o[OUTS];
  unsigned weights[WEIGHTS];
  const int own_row = group * 64 + warp * 16 + lane / 4;  // the thread's rows of a piece: this one and 8 further
  fg::Ring<Q_STAGES> q_ring;
  fg::Ring<STAGES> ring, before;  // of the tile whose scores are computed, and of the one whose weights are at hand
  // Lower halves of descriptors, of slot 0; opaque, or the compiler computes them from the address in every step.
  unsigned q_low = fg::descriptor_low(fg::shared_address(smem.q) + group * 64 * COLUMNS_QK * 2, 16), k_low = fg::descriptor_low(fg::shared_address(smem.k), 16);
  unsigned v_low = fg::descriptor_low(fg::shared_address(smem.v), BLOCK_KV * COLUMNS_V * 2);
  fg::opaque(k_low);
  fg::opaque(v_low);
  constexpr unsigned Q_SLOT = sizeof(smem.q[0]) / 16, K_SLOT = sizeof(smem.k[0]) / 16, V_SLOT = sizeof(smem.v[0]) / 16;  // what descriptors grow by from slot to slot

#pragma unroll 1
  while (true) {
    fg::barrier_wait(smem.q_full[q_ring.slot], q_ring.parity);
    const Piece now = read_piece(smem.work[q_ring.slot]);
    if (fg::uniform(now.b < 0)) break;
    const Lens lens = item(p, now.b).lens;
    const Uniform u = uniform(p, lens, now.b, now.h);
    const int q = now.q_first + own_row;
    const Row score_rows[2] = {row(p, u, q), row(p, u, q + 8)};
    // Weights are powers of two of scores times this.
    const float multiplier = gain(p, u) * (float)fg::LOG2E;
    float sum[2] = {};
    const unsigned queries = q_low + q_ring.slot * Q_SLOT;

    auto start_scores = [&]() {
      const unsigned keys = k_low + ring.slot * K_SLOT;
      fg::keep(s);
      fg::wgmma_fence();
#pragma unroll
      for (int i = 0; i < DIM_QK / 16; ++i) {
        multiply_scores(s, fg::descriptor<COLUMNS_QK>(queries) + fg::step_across<COLUMNS_QK, BLOCK_Q>(i), fg::descriptor<COLUMNS_QK>(keys) + fg::step_across<COLUMNS_QK, BLOCK_KV>(i), i != 0);
      }
      fg::wgmma_commit();
    };
    auto start_out = [&]() {
      const unsigned values = v_low + before.slot * V_SLOT;
      fg::barrier_wait(smem.v_full[before.slot], before.parity);
      fg::keep(o);
      fg::wgmma_fence();
#pragma unroll
      for (int i = 0; i < BLOCK_KV / 16; ++i)
        multiply_out(o, weights[4 * i], weights[4 * i + 1], weights[4 * i + 2], weights[4 * i + 3], fg::descriptor<COLUMNS_V>(values) + fg::step_down<COLUMNS_V>(i));
      fg::wgmma_commit();
    };
    auto release = [&](fg::Barrier& empty) {
      if (lane == 0) fg::barrier_arrive(empty);
    };

    auto apply_score = [&](int own_k) {
      int distance = q - own_k;
      fg::opaque(distance);  // rows and columns of a thread are 8 apart: what depends on the difference alone is computed once for several scores, but not kept
#pragma unroll
      for (int i = 0; i < SCORES; i += 4)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = i * 2 + e;
          const Col col_k = col(p, u, own_k + column);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            s[i + 2 * r + e] = score(p, u, score_rows[r], col_k, s[i + 2 * r + e], q + r * 8, own_k + column, distance, r * 8 - column);
          }
        }
    };
    auto apply_mask = [&](int own_k) {
      const int first_q = fg::shared_int(smem.work[q_ring.slot].q_first) + own_row;  // read again, as its rows are made again: few tiles are partial, and registers short
      const Row mask_rows[2] = {row(p, u, first_q), row(p, u, first_q + 8)};
      const fg::Range seen[2] = {visible(p, u, mask_rows[0], first_q), visible(p, u, mask_rows[1], first_q + 8)};
      fg::mask_outside(s, seen, own_k);
    };
    // Scores to weights, in place.
    auto softmax = [&](int tile, bool partial) {
      const int own_k = tile * BLOCK_KV + lane % 4 * 2;
      if (!partial) {  // no branch between the score's functions and the exponentials, so that the compiler mixes them
        apply_score(own_k);
        fg::exponentiate(s, multiplier, sum);
        return;
      }
      apply_score(own_k);
      if (partial) apply_mask(own_k);
      fg::exponentiate(s, multiplier, sum);
    };
    auto pack_weights = [&]() {
#pragma unroll
      for (int i = 0; i < WEIGHTS; ++i) weights[i] = fg::pack<T>(s[2 * i], s[2 * i + 1]);
    };

    // A step waits for the keys of the next tile, if there is one, before its product with v has ended: they are there by then, and the next scores start at once.
    auto await_keys = [&](bool more) {
      if (fg::uniform(more)) fg::barrier_wait(smem.k_full[ring.slot], ring.parity);
    };
    // Steps take a described tile and return the next one.
    auto first_step = [&](int described) {
      const int tile = described >> KIND_BITS;
      const bool partial = (described >> 2 * group & 3) != fg::FULL;
      fg::barrier_wait(smem.k_full[ring.slot], ring.parity);
      start_scores();
      const int next = fg::shared_int(smem.next_tiles[ring.slot]);
      fg::wgmma_wait<0>();
      fg::keep(s);
      release(smem.k_empty[ring.slot]);
      softmax(tile, partial);
      pack_weights();
      before = ring;
      ring.advance();
      await_keys(next >= 0);
      return next;
    };
    auto step = [&](int described) {
      const int tile = described >> KIND_BITS;
      const bool partial = (described >> 2 * group & 3) != fg::FULL;
      start_scores();
      start_out();
      const int next = fg::shared_int(smem.next_tiles[ring.slot]);
      fg::wgmma_wait<1>();
      fg::keep(s);
      release(smem.k_empty[ring.slot]);
      softmax(tile, partial);
      const unsigned values_slot = before.slot;
      before = ring;
      ring.advance();
      await_keys(next >= 0);
      fg::wgmma_wait<0>();
      fg::keep(o);
      release(smem.v_empty[values_slot]);
      pack_weights();
      return next;
    };
    // Hands a tile back unread.
    auto skip = [&]() {
      // The group meets after each wait, as it does at a step's wgmma: after a wait alone the compiler takes a warp's lanes for scattered (see fg::uniform).
      fg::barrier_wait(smem.k_full[ring.slot], ring.parity);
      fg::group_sync(GROUP_BARRIER + group, 128);
      const int next = fg::shared_int(smem.next_tiles[ring.slot]);
      fg::barrier_wait(smem.v_full[ring.slot], ring.parity);
      fg::group_sync(GROUP_BARRIER + group, 128);
      release(smem.k_empty[ring.slot]);
      release(smem.v_empty[ring.slot]);
      ring.advance();
      return next;
    };
    // Reads the description again, which saves registers in the loop, and hands back the queries.
    auto close_piece = [&]() {
      const Piece piece = read_piece(smem.work[q_ring.slot]);
      __syncwarp();
      release(smem.q_empty[q_ring.slot]);
      q_ring.advance();
      return piece;
    };
    auto last_out = [&]() {
      start_out();
      fg::wgmma_wait<0>();
      fg::keep(o);
      release(smem.v_empty[before.slot]);
    };

#pragma unroll
    for (int i = 0; i < OUTS; ++i) o[i] = 0.0f;
    int described = now.tile;
    // Runs of tiles that hold something for the warpgroup, and tiles that do not.
    auto seen = [&](int described) { return (described >> 2 * group & 3) != fg::EMPTY; };
#pragma unroll 1
    while (true) {
#pragma unroll 1
      while (fg::uniform(described >= 0 && !seen(described))) described = skip();
      if (fg::uniform(described < 0)) break;
      described = first_step(described);
#pragma unroll 1
      while (fg::uniform(described >= 0 && seen(described))) described = step(described);
      last_out();
      fg::group_sync(GROUP_BARRIER + group, 128);  // see skip
    }
    const Piece piece = close_piece();
    const int b = piece.b, h = piece.h;
    // The rows' sums, lse and the factor of their outputs.
    float weight[2];
    constexpr float offset[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = fg::quad_sum(sum[r]);
      const bool empty = sum[r] == 0.0f;
      weight[r] = empty ? 0.0f : 1.0f / sum[r];
      const float lse = (offset[r] + fg::approximate_log2(sum[r])) * (float)fg::LN2;
      const int q = piece.q_first + own_row + r * 8;
      if (lane % 4 == 0 && q < lens.q_len) {
        p.lse[b * p.lse_stride_b + h * p.lse_stride_h + q] = lse;
      }
    }
    unsigned broken = 0;  // bit r: a NaN in the row's outputs but not in its sum may come from a masked key
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float check = 0.0f;
#pragma unroll
      for (int i = 2 * r; i < OUTS; i += 4) check += o[i] + o[i + 1];
      if (check != check && sum[r] == sum[r] && sum[r] != 0.0f && piece.q_first + own_row + r * 8 < lens.q_len) broken |= 1u << r;
    }
#pragma unroll
    for (int i = 0; i < OUTS; ++i) o[i] = weight[i / 2 % 2] == 0.0f ? 0.0f : o[i] * weight[i / 2 % 2];
    // Through shared memory, 64 rows of this warpgroup at a time; TMA leaves out what lies past the tensor.
    if (threadIdx.x % 128 == 0) fg::tma_store_wait_read();
    fg::group_sync(GROUP_BARRIER + group, 128);
    const unsigned staged = fg::shared_address(smem.out);
#pragma unroll
    for (int i = 0; i < OUTS; i += 8) {
      const unsigned to = staged + fg::chunk_offset<COLUMNS_V, BLOCK_Q>(group * 64 + warp * 16 + lane % 16, i / 4 + lane / 16);
      fg::store_matrices(to, fg::pack<T>(o[i], o[i + 1]), fg::pack<T>(o[i + 2], o[i + 3]), fg::pack<T>(o[i + 4], o[i + 5]), fg::pack<T>(o[i + 6], o[i + 7]));
    }
    if (__any_sync(fg::ALL_LANES, broken)) {  // also orders the warp's stores before those that replace them
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll 1
        for (unsigned lanes = __ballot_sync(fg::ALL_LANES, broken >> r & 1); lanes; ) {
          const int quad = (__ffs(lanes) - 1) / 4, q = piece.q_first + own_row - lane / 4 + r * 8 + quad;
          lanes &= ~(0xfu << quad * 4);
          auto store = [&](int d, float x) {
            const unsigned to = fg::chunk_offset<COLUMNS_V, BLOCK_Q>(q - piece.q_first, d / 8);
            reinterpret_cast<T*>(reinterpret_cast<char*>(smem.out) + to)[d % 8] = fg::from_real<T>(x);
          };
          repair_row(p, u, b, h, q, multiplier, __shfl_sync(fg::ALL_LANES, offset[r], quad * 4), __shfl_sync(fg::ALL_LANES, weight[r], quad * 4), store);
        }
      }
    }
    fg::async_proxy_fence();
    fg::group_sync(GROUP_BARRIER + group, 128);
    if (threadIdx.x % 128 == 0) {
#pragma unroll
      for (int d = 0; d < DIM_V; d += COLUMNS_V) fg::tma_store(p.map_out, smem.out + d * BLOCK_Q + group * 64 * COLUMNS_V, d, piece.q_first + group * 64, h, b);
      fg::tma_store_commit();
    }
  }
  if (threadIdx.x % 128 == 0) fg::tma_store_wait_read();  // shared memory must outlive the copies
}
