// Attention backward written by flashgen: sm80, float16, head dims 64/64, family sm80.
// Keys of a row: (k <= q or k <= int_0 - 1).
// Tiles are empty, full or partial by interval evaluation.
// Score: a * s + c, 7 operations per pair, 0 of them loads.

#include "fg/base.h"
#include "fg/interval.h"

using real = float;        // scores, statistics, captured floats
using T = fg::f16;  // q, k, v, out

constexpr int HEAD_DIM_QK = 64;
constexpr int HEAD_DIM_V = 64;
constexpr int GROUP = 1;  // query heads per kv head
constexpr int ALIGNED = 1;
constexpr int BLOCK_KV = 64;
constexpr int BLOCK_Q = 64;
constexpr int BUFFERS = 1;
constexpr int CTAS = 2;
constexpr int DIM_MOST = 64;
constexpr int DIM_QK = 64;
constexpr int DIM_V = 64;
constexpr int DQ_PASSES = 1;
constexpr int KEY_WARPS = 2;
constexpr int QUERY_WARPS = 2;
constexpr int SCORE_PASSES = 1;
constexpr int SCORE_WARPS_Q = 2;
constexpr int SECTION_BYTES = 20971520;
constexpr int SIMT = 0;
constexpr int SMEM_BYTES = 66688;
constexpr int STAGES = 2;
constexpr int UNROLL = 4;
constexpr int WARPS = 4;

#include "fg/math.cuh"
#include "fg/blocks.cuh"
#include "fg/sm80/grad.cuh"
#include "fg/sm80/mma.cuh"
#include "fg/sm80/schedule.cuh"

struct Params {
  const T* q;
  const T* k;
  const T* v;
  const T* out;
  const T* dout;
  T* dq;
  T* dk;
  T* dv;
  const real* lse;
  real* delta;
  const float* capture_0;
  real* grad_0;
  float* dq_sum;
  int* arrived;
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
  long long dout_stride_b;
  long long dout_stride_h;
  long long dout_stride_l;
  long long dq_stride_b;
  long long dq_stride_h;
  long long dq_stride_l;
  long long dk_stride_b;
  long long dk_stride_h;
  long long dk_stride_l;
  long long dv_stride_b;
  long long dv_stride_h;
  long long dv_stride_l;
  long long lse_stride_b;
  long long lse_stride_h;
  long long capture_0_stride_0;
  int batch;
  int heads;
  int kv_heads;
  int q_len;
  int kv_len;
  int capture_0_size_0;
  int int_0;
  float scale;
  int prepare_blocks;
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
};

struct Row {
};

struct Col {
  bool c0;
};

FG_FN Uniform uniform(const Params& p, Lens lens, int b, int h) {
  Uniform u;
  u.lens = lens;
  u.b = b;
  u.h = h;
  const real t0 = real(fg::to_real(p.capture_0[fg::clamp_index(u.h, p.capture_0_size_0) * p.capture_0_stride_0]));
  u.u0 = t0;
  return u;
}

FG_FN Row row(const Params& p, const Uniform& u, int q) {
  Row r{};
  return r;
}

FG_FN Col col(const Params& p, const Uniform& u, int k) {
  Col c{};
  c.c0 = k < p.int_0;
  return c;
}

// s is scale * (q . k)
FG_FN real score(const Params& p, const Uniform& u, const Row& r, const Col& c, real s, int q, int k) {
  return s - u.u0 * fg::log1p(float(fg::int_abs(q - k)));
}

// the score and d score / d s
FG_FN void score_grad(const Params& p, const Uniform& u, const Row& r, const Col& c, real s, int q, int k, real& value, real& slope) {
  value = s - u.u0 * fg::log1p(float(fg::int_abs(q - k)));
  slope = 1.0f;
}

// adds dscore * d score / d capture to the gradients of captured tensors
FG_FN void capture_grads(const Params& p, const Uniform& u, const Row& r, const Col& c, real s, int q, int k, real dscore) {
  fg::grad_add(p.grad_0 + (fg::clamp_index(u.h, p.capture_0_size_0)), dscore * (-fg::log1p(float(fg::int_abs(q - k)))));
}

FG_FN bool mask(const Params& p, const Uniform& u, const Row& r, const Col& c, int q, int k) {
  return (k <= q) | c.c0;
}

// EMPTY, PARTIAL or FULL: the mask over a tile of rows and keys, both ends inclusive
FG_FN int tile_class(const Params& p, const Uniform& u, int q_first, int q_last, int k_first, int k_last) {
  const auto r0 = fg::truth_le(fg::Span{k_first, k_last}, fg::Span{q_first, q_last});
  const auto r1 = fg::truth_lt(fg::Span{k_first, k_last}, fg::Span{p.int_0, p.int_0});
  const auto r2 = fg::truth_or(r0, r1);
  return r2.must ? fg::FULL : r2.may ? fg::PARTIAL : fg::EMPTY;
}

// keys that rows q_first..q_last can see
FG_FN fg::Range kv_range(const Params& p, const Uniform& u, int q_first, int q_last) {
  const auto r0 = fg::span_below(fg::Span{q_first, q_last});
  const auto r1 = fg::span_add(fg::Span{p.int_0, p.int_0}, fg::Span{-1, -1});
  const auto r2 = fg::span_below(r1);
  const auto r3 = fg::span_join(r0, r2);
  return fg::range_within(r3, u.lens.kv_len);
}

// rows that keys k_first..k_last can be seen by
FG_FN fg::Range q_range(const Params& p, const Uniform& u, int k_first, int k_last) {
  const auto r0 = fg::span_above(fg::Span{k_first, k_last});
  const auto r1 = fg::truth_lt(fg::Span{k_first, k_last}, fg::Span{p.int_0, p.int_0});
  const auto r2 = fg::span_if(r1);
  const auto r3 = fg::span_join(r0, r2);
  return fg::range_within(r3, u.lens.q_len);
}

// With P = exp(score - lse), dP = dO V^T and delta = rowsum(dO * O) - dlse:
//   dV = P^T dO     dS = P * (dP - delta) * d score / d s     dK = scale dS^T Q     dQ = scale dS K
// backward_main: a block owns BLOCK_KV keys of one kv head and walks over the q tiles of all query heads of its group; dK and dV stay in registers. Glossary:
//   b, h, kv_head       batch item (or sequence), query head, kv head
//   scores, dp          the tile S (rows x keys) and dP, one warp's part: rows [score_row, + 16 M), keys [score_key, + 8 N SCORE_PASSES), a pass at a time
//   dk, dv              rows are keys: [out_key, + 16 M_K); columns [out_qk, + 8 N_QK), [out_v, + 8 N_V)
//   dq                  rows [dq_row, + 16 M_Q), columns [dq_column, + 8 N_Q DQ_PASSES) of the tile's gradient, a pass at a time
//   acc[m][n][e]        row m * 16 + e / 2 * 8 + lane / 4, column n * 8 + lane % 4 * 2 + e % 2 of such a part
// P and dS cross between warps through shared memory, rounded to T. A barrier after they are written is the only one with STAGES == 3 and BUFFERS == 2: it also
// says that the copies of the next tile have arrived and that nobody reads the previous tile's stage and buffer any more, so that warps may drift apart by half a
// tile. With STAGES == 2 another one precedes the scores, and copies run one tile ahead instead of two; with STAGES == 1 they follow a third barrier.

constexpr int THREADS = WARPS * 32;
constexpr int WINDOW = 128;  // tiles that are classified at a time, each by one thread, so that no code for it burdens the loop
constexpr int SCORE_WARPS_K = WARPS / SCORE_WARPS_Q, M = BLOCK_Q / SCORE_WARPS_Q / 16, ROWS = 2 * M, N = BLOCK_KV / SCORE_WARPS_K / SCORE_PASSES / 8;
constexpr int KEY_WARPS_D = WARPS / KEY_WARPS, M_K = BLOCK_KV / KEY_WARPS / 16, N_QK = DIM_QK / KEY_WARPS_D / 8, N_V = DIM_V / KEY_WARPS_D / 8;
constexpr int QUERY_WARPS_D = WARPS / QUERY_WARPS, M_Q = BLOCK_Q / QUERY_WARPS / 16, N_Q = DIM_QK / QUERY_WARPS_D / DQ_PASSES / 8;
static_assert(M * SCORE_WARPS_Q * 16 == BLOCK_Q && N * SCORE_PASSES * SCORE_WARPS_K * 8 == BLOCK_KV && N % 2 == 0, "scores");
static_assert(BUFFERS == (STAGES == 3 ? 2 : 1), "one barrier a tile needs two of P and dS");
static_assert(M_K * KEY_WARPS * 16 == BLOCK_KV && N_QK * KEY_WARPS_D * 8 == DIM_QK && N_V * KEY_WARPS_D * 8 == DIM_V && N_QK % 2 == 0 && N_V % 2 == 0, "dK and dV");
static_assert(M_Q * QUERY_WARPS * 16 == BLOCK_Q && N_Q * DQ_PASSES * QUERY_WARPS_D * 8 == DIM_QK && N_Q % 2 == 0, "dQ");

struct Smem {
  fg::Tile<BLOCK_KV, DIM_QK> k;  // keys, at the end dK
  fg::Tile<BLOCK_KV, DIM_V> v;   // values, at the end dV
  fg::Tile<BLOCK_Q, DIM_QK> q[STAGES];
  fg::Tile<BLOCK_Q, DIM_V> dout[STAGES];
  fg::Tile<BLOCK_Q, BLOCK_KV> p[BUFFERS], ds[BUFFERS];
  float lse[STAGES][BLOCK_Q], delta[STAGES][BLOCK_Q];
  alignas(128) unsigned char kinds[WINDOW];  // classes of the q tiles window_first, window_first + 1 ... (variants with a mask)
};
static_assert(sizeof(Smem) == SMEM_BYTES, "tiler and kernel disagree");

// exp(score - lse) = exp2(score * multiplier - lse * log2 e); a row without keys has lse = -inf and no probabilities.
FG_FN float log2_sum(float lse) { return lse == -fg::infinity<float>() ? fg::infinity<float>() : lse * (float)fg::LOG2E; }

// Rows of the tensor `name` that belong to (b, h), from the item's first one on.
#define FG_ROWS(name, b, h, start) (p.name + (b) * p.name##_stride_b + (h) * p.name##_stride_h + (start) * p.name##_stride_l)

// dS K has no notion of a masked key: 0 * NaN is NaN. Such rows of dQ are rare and recognised afterwards; this computes one of them exactly, with one warp.
__device__ __forceinline__ void repair_row(const Params& p, const Item& at, const Uniform& u, int b, int h, int q) {
  constexpr int STEPS_QK = (HEAD_DIM_QK + 31) / 32, STEPS_V = (HEAD_DIM_V + 31) / 32;
  const int lane = threadIdx.x % 32;
  const T* const query = FG_ROWS(q, b, h, at.q_start + q);
  const T* const dout = FG_ROWS(dout, b, h, at.q_start + q);
  const T* const keys = FG_ROWS(k, b, h / GROUP, at.k_start);
  const T* const values = FG_ROWS(v, b, h / GROUP, at.k_start);
  const long long index = b * p.lse_stride_b + h * p.lse_stride_h + at.q_start + q;
  const float lse = log2_sum(p.lse[index]), delta = p.delta[index];
  if (lse != lse || delta != delta) return;  // a NaN that the row does see
  const Row row_q = row(p, u, q);
  const fg::Range seen = kv_range(p, u, q, q);
  float acc[STEPS_QK] = {};
#pragma unroll 1
  for (int k = seen.begin; k < seen.end; ++k) {
    const Col col_k = col(p, u, k);
    if (!mask(p, u, row_q, col_k, q, k)) continue;
    float s = 0.0f, dp = 0.0f;
#pragma unroll
    for (int i = 0; i < STEPS_QK; ++i) {
      const int d = i * 32 + lane;
      if (d < HEAD_DIM_QK) s += fg::to_real(query[d]) * fg::to_real(keys[k * p.k_stride_l + d]);
    }
#pragma unroll
    for (int i = 0; i < STEPS_V; ++i) {
      const int d = i * 32 + lane;
      if (d < HEAD_DIM_V) dp += fg::to_real(dout[d]) * fg::to_real(values[k * p.v_stride_l + d]);
    }
    s = fg::warp_sum(s) * p.scale;
    dp = fg::warp_sum(dp);
    float value, slope;
    score_grad(p, u, row_q, col_k, s, q, k, value, slope);
    const float ds = fg::approximate_exp2(value * (float)fg::LOG2E - lse) * (dp - delta) * slope;
#pragma unroll
    for (int i = 0; i < STEPS_QK; ++i) {
      const int d = i * 32 + lane;
      if (d < HEAD_DIM_QK) acc[i] += ds * fg::to_real(keys[k * p.k_stride_l + d]);
    }
  }
  T* const dq = FG_ROWS(dq, b, h, at.q_start + q);
#pragma unroll
  for (int i = 0; i < STEPS_QK; ++i) {
    const int d = i * 32 + lane;
    if (d < HEAD_DIM_QK) dq[d] = fg::from_real<T>(acc[i] * p.scale);
  }
}

FG_FN void repair_rows(const Params& p, const Item& at, const Uniform& u, int b, int h, int first, bool broken) {  // broken: of this lane's row, first + lane / 4
  unsigned lanes = __ballot_sync(fg::ALL_LANES, broken);
  while (lanes) {
    const int quad = (__ffs(lanes) - 1) / 4;
    if (first + quad < at.lens.q_len) repair_row(p, at, u, b, h, first + quad);
    lanes &= ~(0xfu << quad * 4);
  }
}

// The float32 sum of a q tile's dQ lies in the order of the accumulators that are added to it: fragments of 16 rows x 8 columns, 4 elements a lane. From sm_90 on
// a lane's four are neighbours and one instruction adds them.
constexpr int FRAGMENT = 128;
FG_FN float* dq_sum_tile(const Params& p, const Item& at, int b, int h, int tile) {
  return p.dq_sum + (((long long)b * ((p.q_len + BLOCK_Q - 1) / BLOCK_Q) + tile) * p.heads + h) * (BLOCK_Q * DIM_QK);
}

FG_FN void dq_sum_add(float* fragment, const float (&x)[4]) {
  const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
  fg::reduce_add_4(fragment + lane * 4, x);
#else
#pragma unroll
  for (int e = 0; e < 4; ++e) fg::reduce_add(fragment + e * 32 + lane, x[e]);
#endif
}

FG_FN float dq_sum_read(const float* fragment, int e) {
  const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
  return fragment[lane * 4 + e];
#else
  return fragment[e * 32 + lane];
#endif
}

// delta of the nth q tile, and zeros in its sum of dQ, by COUNT threads.
template <int COUNT> FG_FN void prepare(const Params& p, unsigned nth) {
  constexpr int CHUNKS = DIM_V / 8, LANES = CHUNKS >= 32 ? 32 : CHUNKS > 8 ? 16 : CHUNKS > 4 ? 8 : CHUNKS > 2 ? 4 : 2;  // lanes of a row
  const int tiles = (p.q_len + BLOCK_Q - 1) / BLOCK_Q, tile = nth % tiles, b = nth / tiles / p.heads, h = nth / tiles % p.heads;
  const Item at = item(p, b);
  if (tile * BLOCK_Q >= at.lens.q_len) return;
  const T* const out = FG_ROWS(out, b, h, at.q_start);
  const T* const dout = FG_ROWS(dout, b, h, at.q_start);
#pragma unroll 1
  for (int i = threadIdx.x / LANES; i < BLOCK_Q; i += COUNT / LANES) {
    const int q = tile * BLOCK_Q + i;
    float sum = 0.0f;
    if (q < at.lens.q_len) {
#pragma unroll
      for (int chunk = threadIdx.x % LANES; chunk < CHUNKS; chunk += LANES) {
        unsigned x[4], y[4];
        fg::read_chunk<HEAD_DIM_V, ALIGNED>(x, out + q * p.out_stride_l, chunk);
        fg::read_chunk<HEAD_DIM_V, ALIGNED>(y, dout + q * p.dout_stride_l, chunk);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum += fg::element<T>(x, e) * fg::element<T>(y, e);
      }
    }
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) sum += __shfl_xor_sync(fg::ALL_LANES, sum, step);
    if (q < at.lens.q_len && threadIdx.x % LANES == 0) {
      const long long index = b * p.lse_stride_b + h * p.lse_stride_h + at.q_start + q;
      p.delta[index] = sum;
    }
  }
  float4* const zeroed = reinterpret_cast<float4*>(dq_sum_tile(p, at, b, h, tile));
  for (int i = threadIdx.x; i < BLOCK_Q * DIM_QK / 4; i += COUNT) zeroed[i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
}

extern "C" __global__ void __launch_bounds__(128) backward_prepare(const __grid_constant__ Params p) { prepare<128>(p, blockIdx.x); }

// dQ of the nth q tile, by COUNT threads: the float32 sum, times scale, rounded to T.
template <int COUNT> FG_FN void finish(const Params& p, unsigned nth, fg::Tile<BLOCK_Q, DIM_QK>& rounded) {
  constexpr int N_ROW = DIM_QK / 8;
  const int warp = threadIdx.x / 32;
  const int tiles = (p.q_len + BLOCK_Q - 1) / BLOCK_Q, tile = nth % tiles, b = nth / tiles / p.heads, h = nth / tiles % p.heads;
  const Item at = item(p, b);
  if (tile * BLOCK_Q >= at.lens.q_len) return;
  const float* const sum = dq_sum_tile(p, at, b, h, tile);
  unsigned broken = 0;  // bits 2 i, 2 i + 1: this lane's two rows of the warp's i-th fragment row hold something that is not finite
#pragma unroll 1
  for (int m = warp, i = 0; m < BLOCK_Q / 16; m += COUNT / 32, ++i) {
#pragma unroll 4
    for (int n = 0; n < N_ROW; ++n) {
      const float* const fragment = sum + (m * N_ROW + n) * FRAGMENT;
      float dq[1][1][4];
#pragma unroll
      for (int e = 0; e < 4; ++e) dq[0][0][e] = dq_sum_read(fragment, e) * p.scale;
      fg::store_accumulators<T>(fg::lane_own<0>(rounded, m * 16, n), dq);
      const float low = dq[0][0][0] * 0.0f + dq[0][0][1] * 0.0f, high = dq[0][0][2] * 0.0f + dq[0][0][3] * 0.0f;
      broken |= ((low != low) | (high != high) << 1) << 2 * i;
    }
  }
  __syncthreads();
  fg::store_tile<COUNT, HEAD_DIM_QK, ALIGNED>(FG_ROWS(dq, b, h, at.q_start + tile * BLOCK_Q), p.dq_stride_l, at.lens.q_len - tile * BLOCK_Q, rounded);
  if (__syncthreads_or(broken)) {
    const Uniform u = uniform(p, at.lens, b, h);
#pragma unroll 1
    for (int m = warp, i = 0; m < BLOCK_Q / 16; m += COUNT / 32, ++i)
#pragma unroll 1
      for (int half = 0; half < 2; ++half) repair_rows(p, at, u, b, h, tile * BLOCK_Q + m * 16 + half * 8, broken >> (2 * i + half) & 1);
  }
}

extern "C" __global__ void __launch_bounds__(128) backward_finish(const __grid_constant__ Params p) {
  __shared__ fg::Tile<BLOCK_Q, DIM_QK> rounded;
  finish<128>(p, blockIdx.x, rounded);
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) backward_main(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);

  if (p.prepare_blocks) {  // else backward_prepare has run
    if (blockIdx.x < p.prepare_blocks) {
      prepare<THREADS>(p, blockIdx.x);
      fg::blocks_arrive(p.arrived);
      return;
    }
    fg::blocks_wait(p.arrived, p.prepare_blocks);
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int kv_tiles = (p.kv_len + BLOCK_KV - 1) / BLOCK_KV;
  const fg::Work work = fg::work_of_block(blockIdx.x - p.prepare_blocks, kv_tiles, p.batch * p.kv_heads, p.q_len * 2ll * (DIM_QK + DIM_V) * GROUP, SECTION_BYTES);
  const int b = fg::same_in_warp(work.head / p.kv_heads), kv_head = work.head - b * p.kv_heads, k_first = (kv_tiles - 1 - work.tile) * BLOCK_KV;
  const Item at = item(p, b);
  const int q_len = at.lens.q_len, kv_len = at.lens.kv_len;
  const int k_last = min(k_first + BLOCK_KV, kv_len) - 1;  // < k_first for keys beyond seqlens_k, whose gradients are 0

  // A q tile of the walk, DONE at its end.
  constexpr int DONE = -2;
  struct Place { int head, tile, kind; };
  Uniform ahead;  // of the head where the walk looks for tiles, which end at ahead_end
  int ahead_end;
  int window_first = 0, window_end = 0;
  auto classify = [&](int first) {  // the WINDOW of tiles that begins with `first`
    window_first = first;
    window_end = min(first + WINDOW, ahead_end);
    for (int tile = first + threadIdx.x; tile < window_end; tile += THREADS) {
      const int q_first = tile * BLOCK_Q;
      int kind = tile_class(p, ahead, q_first, min(q_first + BLOCK_Q, q_len) - 1, k_first, k_last);
      if (kind == fg::FULL && (q_first + BLOCK_Q > q_len || k_first + BLOCK_KV > kv_len)) kind = fg::PARTIAL;
      smem.kinds[tile - first] = kind;
    }
  };
  auto open_head = [&](Place& place) {
    ahead = uniform(p, at.lens, b, kv_head * GROUP + place.head);
    const fg::Range seen = k_last < k_first ? fg::Range{0, 0} : q_range(p, ahead, k_first, k_last);
    place.tile = seen.begin / BLOCK_Q - 1;
    ahead_end = (seen.end + BLOCK_Q - 1) / BLOCK_Q;
    window_end = place.tile + 1;
  };
  auto advance = [&](Place& place) {  // to the next tile that sees a key of this block; all threads of the block call it together
    while (place.tile != DONE) {
      if (++place.tile >= ahead_end) {
        if (GROUP == 1 || ++place.head == GROUP) place.tile = DONE;
        else open_head(place);
        continue;
      }
      if (place.tile >= window_end) {
        __syncthreads();
        classify(place.tile);
        __syncthreads();
      }
      place.kind = smem.kinds[place.tile - window_first];
      if (place.kind == fg::EMPTY) continue;
      return;
    }
  };
  auto load = [&](const Place& place, int stage) {
    if (place.tile == DONE) return;
    const int h = kv_head * GROUP + place.head, q_first = place.tile * BLOCK_Q, rows = q_len - q_first;
    fg::load_tile<THREADS, HEAD_DIM_QK, ALIGNED>(smem.q[stage], FG_ROWS(q, b, h, at.q_start), p.q_stride_l, q_first, q_len);
    fg::load_tile<THREADS, HEAD_DIM_V, ALIGNED>(smem.dout[stage], FG_ROWS(dout, b, h, at.q_start), p.dout_stride_l, q_first, q_len);
    const long long index = b * p.lse_stride_b + h * p.lse_stride_h + at.q_start + q_first;
    for (int i = threadIdx.x; i < BLOCK_Q; i += THREADS) {
      fg::copy_async_4(fg::shared_address(&smem.lse[stage][i]), p.lse + index + i, i < rows ? 4 : 0);
      fg::copy_async_4(fg::shared_address(&smem.delta[stage][i]), p.delta + index + i, i < rows ? 4 : 0);
    }
  };

  const int score_row = warp / SCORE_WARPS_K * M * 16, score_key = warp % SCORE_WARPS_K * SCORE_PASSES * N * 8;
  const int out_key = warp / KEY_WARPS_D * M_K * 16, out_qk = warp % KEY_WARPS_D * N_QK * 8, out_v = warp % KEY_WARPS_D * N_V * 8;
  const auto s_q_lane = fg::lane_down(smem.q[0], score_row);
  const auto s_k_lane = fg::lane_across(smem.k, score_key);
  const auto dp_dout_lane = fg::lane_down(smem.dout[0], score_row);
  const auto dp_v_lane = fg::lane_across(smem.v, score_key);
  const auto own_p_lane = fg::lane_own<N * SCORE_PASSES>(smem.p[0], score_row, score_key / 8);
  const auto own_ds_lane = fg::lane_own<N * SCORE_PASSES>(smem.ds[0], score_row, score_key / 8);
  const auto dv_p_lane = fg::lane_across<2 * M_K>(smem.p[0], 0, out_key / 8);
  const auto dv_dout_lane = fg::lane_down<N_V>(smem.dout[0], 0, out_v / 8);
  float dv[M_K][N_V][4];
  fg::clear(dv);
  const auto dk_ds_lane = fg::lane_across<2 * M_K>(smem.ds[0], 0, out_key / 8);
  const auto dk_q_lane = fg::lane_down<N_QK>(smem.q[0], 0, out_qk / 8);
  float dk[M_K][N_QK][4];
  fg::clear(dk);
  const int dq_row = warp / QUERY_WARPS_D * M_Q * 16, dq_column = warp % QUERY_WARPS_D * DQ_PASSES * N_Q * 8;
  const auto dq_ds_lane = fg::lane_down(smem.ds[0], dq_row);
  const auto dq_k_lane = fg::lane_down<N_Q * DQ_PASSES>(smem.k, 0, dq_column / 8);
  constexpr float multiplier = (float)fg::LOG2E;
  Place place{};
  open_head(place);
  advance(place);
  Place next = place;
  advance(next);
  if (place.tile != DONE) {
    fg::load_tile<THREADS, HEAD_DIM_QK, ALIGNED>(smem.k, FG_ROWS(k, b, kv_head, at.k_start), p.k_stride_l, k_first, kv_len);
    fg::load_tile<THREADS, HEAD_DIM_V, ALIGNED>(smem.v, FG_ROWS(v, b, kv_head, at.k_start), p.v_stride_l, k_first, kv_len);
  }
  load(place, 0);
  fg::copy_commit();
  if constexpr (STAGES == 3) {
    load(next, 1);
    fg::copy_commit();
    fg::copy_wait<1>();
    __syncthreads();
  }
  Uniform u = uniform(p, at.lens, b, kv_head * GROUP + place.head % GROUP);
  int stage = 0, buffer = 0;

#pragma unroll 1
  while (place.tile != DONE) {
    if constexpr (STAGES < 3) {
      fg::copy_wait<0>();
      __syncthreads();
    }
    if constexpr (STAGES == 2) {
      load(next, stage ^ 1);
      fg::copy_commit();
    }
    const int own_q = place.tile * BLOCK_Q + score_row + lane / 4, own_k = k_first + score_key + lane % 4 * 2;

    Row rows[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) rows[r] = row(p, u, own_q + r * 8);
    float row_lse[ROWS], row_delta[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      row_lse[r] = log2_sum(smem.lse[stage][score_row + lane / 4 + r * 8]);
      row_delta[r] = smem.delta[stage][score_row + lane / 4 + r * 8];
    }
#pragma unroll 1  // passes are there to save registers
    for (int pass = 0; pass < SCORE_PASSES; ++pass) {
      float scores[M][N][4], dp[M][N][4];
      fg::clear(scores);
      fg::clear(dp);
      fg::multiply<T, DIM_QK / 16, false, true, UNROLL>(scores, s_q_lane.shifted(stage * sizeof(smem.q[0])), s_k_lane.shifted(pass * N * 8 * smem.k.PITCH));
      fg::multiply<T, DIM_V / 16, false, true, UNROLL>(dp, dp_dout_lane.shifted(stage * sizeof(smem.dout[0])), dp_v_lane.shifted(pass * N * 8 * smem.v.PITCH));
      // Score and lse to probability, then to d score; what is not visible is selected to 0.
      auto differentiate = [&](bool partial) {
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int k = own_k + (pass * N + n) * 8 + i;
            const Col col_k = col(p, u, k);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
              const int q = own_q + r * 8;
              float& s = scores[r / 2][n][r % 2 * 2 + i];
              float& d = dp[r / 2][n][r % 2 * 2 + i];
              bool visible = true;
              if (partial) {
                visible = q < q_len && k < kv_len;
                visible = visible && mask(p, u, rows[r], col_k, q, k);
              }
              float value, slope;
              const float scaled = s * p.scale;
              score_grad(p, u, rows[r], col_k, scaled, q, k, value, slope);
              s = fg::exp2_fast(value * multiplier - row_lse[r]);
              if (partial && !visible) s = 0.0f;
              d = s * (d - row_delta[r]);
              if (partial && !visible) d = 0.0f;
              if (visible) capture_grads(p, u, rows[r], col_k, scaled, q, k, d);
              d *= slope;
              if (partial && !visible) d = 0.0f;
            }
          }
      };
      const bool partial = place.kind == fg::PARTIAL;
      if (partial) differentiate(true);
      else differentiate(false);
      fg::store_accumulators<T>(own_p_lane.moved(pass * N).shifted(buffer * sizeof(smem.p[0])), scores);
      fg::store_accumulators<T>(own_ds_lane.moved(pass * N).shifted(buffer * sizeof(smem.ds[0])), dp);
    }
    Place after = next;
    advance(after);
    if constexpr (STAGES == 3) fg::copy_wait<0>();
    __syncthreads();
    if constexpr (STAGES == 3) {
      load(after, stage == 0 ? 2 : stage - 1);
      fg::copy_commit();
    }

    fg::multiply<T, BLOCK_Q / 16, true, false>(dv, dv_p_lane.shifted(buffer * sizeof(smem.p[0])), dv_dout_lane.shifted(stage * sizeof(smem.dout[0])));
    float* const dq_tile = dq_sum_tile(p, at, b, kv_head * GROUP + place.head, place.tile) + (dq_row / 16 * (DIM_QK / 8) + dq_column / 8) * FRAGMENT;
#pragma unroll 1
    for (int pass = 0; pass < DQ_PASSES; ++pass) {
      float dq[M_Q][N_Q][4];
      fg::clear(dq);
      fg::multiply<T, BLOCK_KV / 16, false, false>(dq, dq_ds_lane.shifted(buffer * sizeof(smem.ds[0])), dq_k_lane.moved(pass * N_Q));
#pragma unroll
      for (int m = 0; m < M_Q; ++m)
#pragma unroll
        for (int n = 0; n < N_Q; ++n) dq_sum_add(dq_tile + (m * (DIM_QK / 8) + pass * N_Q + n) * FRAGMENT, dq[m][n]);
    }
    fg::multiply<T, BLOCK_Q / 16, true, false>(dk, dk_ds_lane.shifted(buffer * sizeof(smem.ds[0])), dk_q_lane.shifted(stage * sizeof(smem.q[0])));
    if constexpr (STAGES == 1) {
      __syncthreads();
      load(next, 0);
      fg::copy_commit();
    }
    if constexpr (STAGES == 2) stage ^= 1;
    if constexpr (STAGES == 3) {
      stage = stage == 2 ? 0 : stage + 1;
      buffer ^= 1;
    }
    if (next.head != place.head && next.tile != DONE) u = uniform(p, at.lens, b, kv_head * GROUP + next.head);
    place = next;
    next = after;
  }

  // Keys past kv_len are zero rows with zero gradients: written as far as the tensor reaches.
  fg::copy_wait<0>();
  __syncthreads();
  const int keys_left = p.kv_len - k_first;
#pragma unroll
  for (int m = 0; m < M_K; ++m)
#pragma unroll
    for (int n = 0; n < N_QK; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) dk[m][n][e] *= p.scale;
  fg::store_accumulators<T>(fg::lane_own<N_QK>(smem.k, out_key, out_qk / 8), dk);
  fg::store_accumulators<T>(fg::lane_own<N_V>(smem.v, out_key, out_v / 8), dv);
  __syncthreads();
  fg::store_tile<THREADS, HEAD_DIM_QK, ALIGNED>(FG_ROWS(dk, b, kv_head, at.k_start + k_first), p.dk_stride_l, keys_left, smem.k);
  fg::store_tile<THREADS, HEAD_DIM_V, ALIGNED>(FG_ROWS(dv, b, kv_head, at.k_start + k_first), p.dv_stride_l, keys_left, smem.v);
}
