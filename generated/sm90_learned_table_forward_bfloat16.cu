// Attention forward written by flashgen: sm90a, bfloat16, head dims 128/128, family sm90.
// No mask: every tile is full.
// Score: a * s + c, 6 operations per pair, 1 of them loads.

#include "fg/base.h"
#include "fg/interval.h"

using real = float;        // scores, statistics, captured floats
using T = fg::bf16;  // q, k, v, out

constexpr int HEAD_DIM_QK = 128;
constexpr int HEAD_DIM_V = 128;
constexpr int GROUP = 1;  // query heads per kv head
constexpr int AHEAD = 0;
constexpr int BLOCK_KV = 144;
constexpr int BLOCK_Q = 128;
constexpr int COLUMNS_QK = 64;
constexpr int COLUMNS_V = 64;
constexpr int CONSUMER_REGISTERS = 224;
constexpr int CONSUMERS = 2;
constexpr int DIM_QK = 128;
constexpr int DIM_V = 128;
constexpr int EARLY_KEYS = 1;
constexpr int HOLES = 0;
constexpr int MASK_BITS = 0;
constexpr int OUT_REGISTERS = 64;
constexpr int PRODUCER_REGISTERS = 56;
constexpr int Q_STAGES = 2;
constexpr int SCANNED = 0;
constexpr int SCHEDULE = 1;
constexpr int SCORE_REGISTERS = 72;
constexpr int SECTION_BYTES = 16777216;
constexpr int SHORTEST_LAST = 0;
constexpr int SMEM_BYTES = 214016;
constexpr int SMS = 132;
constexpr int STAGES = 2;
constexpr int STAGGER = 1;
constexpr int STORE_REGISTERS = 1;

#include "fg/math.cuh"
#include "fg/sm90/layout.cuh"
#include "fg/sm90/ptx.cuh"
#include "fg/sm90/schedule.cuh"
#include "fg/sm90/softmax.cuh"

// d (64 x 144) = a b, or += with `accumulate`: both operands in shared memory, their rows along the depth of the product.
__device__ __forceinline__ void multiply_scores(float (&d)[72], fg::Descriptor a, fg::Descriptor b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %74, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n144k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71"
      "}, %72, %73, p, 1, 1, 0, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
        "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
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
  const float* capture_0;
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
  long long capture_0_stride_0;
  long long capture_0_stride_1;
  int batch;
  int heads;
  int kv_heads;
  int q_len;
  int kv_len;
  int capture_0_size_0;
  int capture_0_size_1;
  int int_0;
  int int_1;
  int int_2;
  float scale;
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
  int u0;
};

struct Row {
};

struct Col {
};

struct Gap {
  real g0;
};

FG_FN Uniform uniform(const Params& p, Lens lens, int b, int h) {
  Uniform u;
  u.lens = lens;
  u.b = b;
  u.h = h;
  u.u0 = u.lens.kv_len - u.lens.q_len;
  return u;
}

FG_FN Row row(const Params& p, const Uniform& u, int q) {
  Row r{};
  return r;
}

FG_FN Col col(const Params& p, const Uniform& u, int k) {
  Col c{};
  return c;
}

// what depends on q - k = d + step alone, where step is a number in an unrolled loop
FG_FN Gap gap(const Params& p, const Uniform& u, int d, int step) {
  Gap g{};
  const real t0 = real(fg::to_real(fg::element(p.capture_0 + fg::clamp_index(u.h, p.capture_0_size_0) * p.capture_0_stride_0, fg::clamp_index(fg::int_min(fg::int_max((d + step) + u.u0, p.int_0), p.int_1) + p.int_2, p.capture_0_size_1), (int)p.capture_0_stride_1)));
  g.g0 = t0;
  return g;
}

// it is made of an entry of a captured tensor,
FG_FN Gap gap_of(const Params& p, const Uniform& u, float entry) {
  Gap g{};
  g.g0 = real(fg::to_real(entry));
  return g;
}

// one of these,
FG_FN const float* gap_entries(const Params& p, const Uniform& u) {
  return p.capture_0 + fg::clamp_index(u.h, p.capture_0_size_0) * p.capture_0_stride_0;
}

// the one with this index, which changes by at most as much as d = q - k does
FG_FN int gap_index(const Params& p, const Uniform& u, int d) {
  return fg::clamp_index(fg::int_min(fg::int_max(d + u.u0, p.int_0), p.int_1) + p.int_2, p.capture_0_size_1);
}

// s is q . k; q - k is d + step, where step is a number in an unrolled loop
FG_FN real score(const Params& p, const Uniform& u, const Row& r, const Col& c, const Gap& g, real s, int q, int k, int d, int step) {
  return fg::fma(p.scale, s, g.g0);
}

// keys that rows q_first..q_last can see
FG_FN fg::Range kv_range(const Params& p, const Uniform& u, int q_first, int q_last) {
  return fg::Range{0, u.lens.kv_len};
}

// rows that keys k_first..k_last can be seen by
FG_FN fg::Range q_range(const Params& p, const Uniform& u, int k_first, int k_last) {
  return fg::Range{0, u.lens.q_len};
}

// A block takes tiles of BLOCK_Q query rows of one head, one after the other, and walks through the keys in tiles of BLOCK_KV, the last ones first.
// Warpgroup 0 is the producer: its first warp chooses the tiles and loads them by TMA. Warpgroups 1 .. CONSUMERS are the consumers: 64 rows each, for all keys.
// Glossary:
//   b, h               batch item and query head; the kv head is h / GROUP
//   s[4 j + 2 r + e]   score of row r * 8 + g of the warp's 16 and column 8 j + 2 c + e, with g = lane / 4, c = lane % 4: wgmma's accumulator; o likewise.
//                      The four lanes of a quad share a thread's two rows r = 0, 1
//   weights            probabilities as the next product's operand: pairs of s, in place
//   rows               the references that the weights of a thread's rows are relative to, and their sums (see fg/sm90/softmax.cuh)
// A step starts the scores of one tile, then o += weights v of the tile before it, and runs the softmax while the latter is in flight.
// Barriers (full: the TMA's bytes and the producer's arrival; empty: lane 0 of each consumer warp):
//   q_full, q_empty    a piece of work: its queries and its description `work`; the queries' slot is free again when the last scores are computed
//   k_full, k_empty    a tile of keys
//   v_full, v_empty    a tile of values; consumers use one Ring for both, since a tile's keys and values take the same slot
// Whoever fills waits for "empty" with the parity of the round before (a fresh barrier lets it pass), whoever reads waits for "full" with that of this round.

constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int SCORES = SCORE_REGISTERS, OUTS = OUT_REGISTERS, WEIGHTS = SCORES / 2;  // registers of a thread
constexpr int GROUP_BARRIER = 1;    // named barriers: one for each consumer warpgroup
constexpr int STAGGER_BARRIER = 4;  // named barriers of all consumers, one for each slot of queries: nobody is two pieces ahead
struct Piece { int b, h, q_first, tile; };  // what a block works on, down from `tile` of the keys; tile < 0: none is seen; b < 0: no more work
__device__ __forceinline__ Piece read_piece(const Piece& x) { return Piece{fg::shared_int(x.b), fg::shared_int(x.h), fg::shared_int(x.q_first), fg::shared_int(x.tile)}; }
struct alignas(1024) Smem {
  T q[Q_STAGES][BLOCK_Q * DIM_QK];
  T k[STAGES][BLOCK_KV * DIM_QK];
  T v[STAGES][BLOCK_KV * DIM_V];
  fg::Barrier q_full[Q_STAGES], q_empty[Q_STAGES], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
  Piece work[Q_STAGES];
};
static_assert(sizeof(Smem) == SMEM_BYTES, "tiler and kernel disagree");

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int group = __shfl_sync(fg::ALL_LANES, threadIdx.x / 128, 0) - 1, warp = __shfl_sync(fg::ALL_LANES, threadIdx.x / 32 % 4, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Q_STAGES; ++i) {
      fg::barrier_init(smem.q_full[i], 1);
      fg::barrier_init(smem.q_empty[i], CONSUMERS * 4);
    }
    for (int i = 0; i < STAGES; ++i) {
      fg::barrier_init(smem.k_full[i], 1);
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
    int n = blockIdx.x;
#pragma unroll 1
    while (n < p.pieces) {
      const fg::Work work = fg::nth_longest(n, p.q_tiles, p.batch * p.heads, p.section);
      const int b = work.head / p.heads, h = work.head - b * p.heads, q_first = work.tile * BLOCK_Q;
      const Lens lens = item(p, b).lens;
      const int kv_len = lens.kv_len;
      const int last = (kv_len + BLOCK_KV - 1) / BLOCK_KV - 1;
      auto load_keys = [&](int tile) {
        fg::barrier_wait(smem.k_empty[k_ring.slot], k_ring.parity ^ 1);
        if (lane == 0) {
          fg::barrier_expect(smem.k_full[k_ring.slot], sizeof(smem.k[0]));
#pragma unroll
          for (int d = 0; d < DIM_QK; d += COLUMNS_QK)
            fg::tma_load(smem.k[k_ring.slot] + d * BLOCK_KV, p.map_k, smem.k_full[k_ring.slot], d, tile * BLOCK_KV, entry(h / GROUP, p.k_stride_h), entry(b, p.k_stride_b), fg::READ_AGAIN);
        }
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
          smem.work[q_ring.slot] = Piece{b, h, q_first, last};
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
      if (last >= 0) load_keys(last);
      load_queries(last >= 0);
      q_ring.advance();
#pragma unroll 1
      for (int tile = last; tile >= 0; --tile) {
        if (tile > 0) load_keys(tile - 1);
        load_values(tile);
      }
      n += gridDim.x;
    }
    fg::barrier_wait(smem.q_empty[q_ring.slot], q_ring.parity ^ 1);
    if (lane == 0) {
      smem.work[q_ring.slot] = Piece{-1};
      fg::barrier_arrive(smem.q_full[q_ring.slot]);
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
    constexpr float multiplier = (float)fg::LOG2E;
    fg::OnlineSoftmax<int> rows;
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

    // The entries of a tile's differences, where they lie side by side: that of q - own_k.
    auto apply_score_to_entries = [&](int own_k, int distance, const float* entries) {
#pragma unroll
      for (int i = 0; i < SCORES; i += 4)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = i * 2 + e;
          const Col col_k = col(p, u, own_k + column);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const Gap gap_qk = gap_of(p, u, entries[r * 8 - column]);
            s[i + 2 * r + e] = score(p, u, score_rows[r], col_k, gap_qk, s[i + 2 * r + e], q + r * 8, own_k + column, distance, r * 8 - column);
          }
        }
    };
    auto apply_score = [&](int own_k) {
      int distance = q - own_k;
      fg::opaque(distance);  // rows and columns of a thread are 8 apart: what depends on the difference alone is computed once for several scores, but not kept
      // An index changes by at most as much as q - k: if the first and the last one are as far apart as their differences, so are all between them.
      constexpr int SPAN = SCORES * 2 + 1;
      const int largest = gap_index(p, u, distance + 8), smallest = gap_index(p, u, distance + 8 - SPAN);
      const bool adjacent = p.capture_0_stride_1 == 1 && largest - smallest == SPAN;
      if (__all_sync(fg::ALL_LANES, adjacent)) return apply_score_to_entries(own_k, distance, gap_entries(p, u) + (largest - 8));
#pragma unroll
      for (int i = 0; i < SCORES; i += 4)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = i * 2 + e;
          const Col col_k = col(p, u, own_k + column);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const Gap gap_qk = gap(p, u, distance, r * 8 - column);
            s[i + 2 * r + e] = score(p, u, score_rows[r], col_k, gap_qk, s[i + 2 * r + e], q + r * 8, own_k + column, distance, r * 8 - column);
          }
        }
    };
    auto apply_mask = [&](int own_k) {
#pragma unroll
      for (int i = 0; i < SCORES; i += 4)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int k = own_k + i * 2 + e;
          if (k >= lens.kv_len) s[i + e] = s[i + 2 + e] = -fg::infinity<float>();
        }
    };
    // Scores to weights, in place; true if a reference moved: then what o has gathered must be multiplied by rows.factor.
    auto softmax = [&](int tile, bool partial) {
      const int own_k = tile * BLOCK_KV + lane % 4 * 2;
      apply_score(own_k);
      if (partial) apply_mask(own_k);
      const bool moved = fg::reach(s, rows.threshold);
      if (moved) rows.move(s, multiplier);
      fg::exponentiate(s, multiplier, rows.offset, rows.sum);
      return moved;
    };
    auto pack_weights = [&]() {
#pragma unroll
      for (int i = 0; i < WEIGHTS; ++i) weights[i] = fg::pack<T>(s[2 * i], s[2 * i + 1]);
    };

    // A step waits for the keys of the next tile, if there is one, before its product with v has ended: they are there by then, and the next scores start at once.
    auto await_keys = [&](bool more) {
      if (fg::uniform(more)) fg::barrier_wait(smem.k_full[ring.slot], ring.parity);
    };
    auto first_step = [&](int tile) {
      const bool partial = (tile + 1) * BLOCK_KV > lens.kv_len;
      if (group == CONSUMERS - 1) fg::group_sync(STAGGER_BARRIER + q_ring.slot, THREADS - 128);  // the warpgroups run half a step apart: one in its softmax while the other multiplies
      fg::barrier_wait(smem.k_full[ring.slot], ring.parity);
      start_scores();
      fg::wgmma_wait<0>();
      fg::keep(s);
      if (group != CONSUMERS - 1) fg::group_arrive(STAGGER_BARRIER + q_ring.slot, THREADS - 128);
      release(smem.k_empty[ring.slot]);
      softmax(tile, partial);
      pack_weights();
      before = ring;
      ring.advance();
      await_keys(tile > 0);
    };
    auto step = [&](int tile) {
      constexpr bool partial = false;
      start_scores();
      start_out();
      fg::wgmma_wait<1>();
      fg::keep(s);
      release(smem.k_empty[ring.slot]);
      const bool moved = softmax(tile, partial);
      const unsigned values_slot = before.slot;
      before = ring;
      ring.advance();
      await_keys(tile > 0);
      fg::wgmma_wait<0>();
      fg::keep(o);
      release(smem.v_empty[values_slot]);
      pack_weights();
      if (moved) fg::scale_rows(o, rows.factor);
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
    int tile = now.tile;
    const bool some = tile >= 0;
    if (fg::uniform(some)) {
      first_step(tile);
#pragma unroll 1
      for (--tile; fg::uniform(tile >= 0); --tile) step(tile);
    }
    const Piece piece = close_piece();
    if (fg::uniform(some)) last_out();
    const int b = piece.b, h = piece.h;
    // The rows' sums, lse and the factor of their outputs.
    float weight[2];
    float (&sum)[2] = rows.sum, (&offset)[2] = rows.offset;
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
#pragma unroll
    for (int i = 0; i < OUTS; ++i) o[i] = weight[i / 2 % 2] == 0.0f ? 0.0f : o[i] * weight[i / 2 % 2];
    // Straight to memory: each quad exchanges the eight columns of four lanes for those of one, so that a lane stores 16 bytes.
    auto store_rows = [&](T* to) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int i = 0; i < OUTS; i += 16) {
          unsigned x[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) x[j] = i + 4 * j < OUTS ? fg::pack<T>(o[i + 4 * j + 2 * r], o[i + 4 * j + 2 * r + 1]) : 0;
          const uint4 columns = fg::quad_transpose(x[0], x[1], x[2], x[3], lane);
          const int q = piece.q_first + own_row + r * 8, d = i * 2 + lane % 4 * 8;
          if (q < lens.q_len && d < HEAD_DIM_V) *reinterpret_cast<uint4*>(to + q * p.out_stride_l + d) = columns;
        }
    };
    store_rows(p.out + b * p.out_stride_b + h * p.out_stride_h);
  }
}
