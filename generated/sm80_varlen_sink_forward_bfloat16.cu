// Attention forward written by flashgen: sm80, bfloat16, head dims 128/128, family sm80, sink, varlen.
// Keys of a row: k <= q + kv_len - q_len.
// Tiles are empty, full or partial by interval evaluation.

#include "fg/base.h"
#include "fg/interval.h"

using real = float;        // scores, statistics, captured floats
using T = fg::bf16;  // q, k, v, out

constexpr int HEAD_DIM_QK = 128;
constexpr int HEAD_DIM_V = 128;
constexpr int GROUP = 1;  // query heads per kv head
constexpr int ALIGNED = 1;
constexpr int BLOCK_KV = 48;
constexpr int BLOCK_Q = 128;
constexpr int CTAS = 2;
constexpr int DIM_MOST = 128;
constexpr int DIM_QK = 128;
constexpr int DIM_V = 128;
constexpr int Q_IN_REGISTERS = 0;
constexpr int SECTION_BYTES = 20971520;
constexpr int SIMT = 0;
constexpr int SMEM_BYTES = 82560;
constexpr int STAGES = 2;
constexpr int UNROLL = 8;
constexpr int WARPS = 4;

#include "fg/math.cuh"
#include "fg/sm80/mma.cuh"
#include "fg/sm80/schedule.cuh"

struct Params {
  const T* q;
  const T* k;
  const T* v;
  T* out;
  real* lse;
  const real* sink;
  const int* cu_seqlens_q;
  const int* cu_seqlens_k;
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
  int total_q;
  int total_k;
  float scale;
};

struct Lens { int q_len, kv_len; };
struct Item { long long q_start, k_start; Lens lens; };  // rows of a batch item within its tensors, and its lengths

FG_FN Item item(const Params& p, int b) {
  const fg::Range rows = fg::sequence(p.cu_seqlens_q, b, p.total_q), keys = fg::sequence(p.cu_seqlens_k, b, p.total_k);
  return Item{rows.begin, keys.begin, Lens{rows.end - rows.begin, keys.end - keys.begin}};
}

// The variant: what depends on the head alone, on the row, on the key, and the rest per score.
struct Uniform {
  Lens lens;
  int b, h;
  int u0;
};

struct Row {
  int r0;
};

struct Col {
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
  r.r0 = q + u.u0;
  return r;
}

FG_FN Col col(const Params& p, const Uniform& u, int k) {
  Col c{};
  return c;
}

FG_FN bool mask(const Params& p, const Uniform& u, const Row& r, const Col& c, int q, int k) {
  return k <= r.r0;
}

// EMPTY, PARTIAL or FULL: the mask over a tile of rows and keys, both ends inclusive
FG_FN int tile_class(const Params& p, const Uniform& u, int q_first, int q_last, int k_first, int k_last) {
  const auto r0 = fg::span_sub(fg::Span{u.lens.kv_len, u.lens.kv_len}, fg::Span{u.lens.q_len, u.lens.q_len});
  const auto r1 = fg::span_add(fg::Span{q_first, q_last}, r0);
  const auto r2 = fg::truth_le(fg::Span{k_first, k_last}, r1);
  return r2.must ? fg::FULL : r2.may ? fg::PARTIAL : fg::EMPTY;
}

// keys that rows q_first..q_last can see
FG_FN fg::Range kv_range(const Params& p, const Uniform& u, int q_first, int q_last) {
  const auto r0 = fg::span_add(fg::Span{u.lens.kv_len, u.lens.kv_len}, fg::Span{q_first, q_last});
  const auto r1 = fg::span_sub(r0, fg::Span{u.lens.q_len, u.lens.q_len});
  const auto r2 = fg::span_below(r1);
  return fg::range_within(r2, u.lens.kv_len);
}

// rows that keys k_first..k_last can be seen by
FG_FN fg::Range q_range(const Params& p, const Uniform& u, int k_first, int k_last) {
  const auto r0 = fg::span_add(fg::Span{u.lens.q_len, u.lens.q_len}, fg::Span{k_first, k_last});
  const auto r1 = fg::span_sub(r0, fg::Span{u.lens.kv_len, u.lens.kv_len});
  const auto r2 = fg::span_above(r1);
  return fg::range_within(r2, u.lens.q_len);
}

// One block computes BLOCK_Q query rows of one head. Glossary:
//   b, h                batch item (or sequence) and query head; the kv head is h / GROUP
//   warp w              owns rows [w * WARP_ROWS, (w + 1) * WARP_ROWS) of the block's tile, for all keys: no exchange between warps
//   m, n                16-row and 8-column fragments of accumulators; g = lane / 4, c = lane % 4
//   acc[m][n][e]        row m * 16 + e / 2 * 8 + g, column n * 8 + 2 c + e % 2
//   r = 2 m + e / 2     the ROWS rows of a thread; the four lanes of a quad share a row
//   tile, kind          kv tile number and its class under the mask for this warp's rows: FULL ones run without mask code, EMPTY ones not at all; a tile that is EMPTY
//                       for all warps is not loaded
//   offset[r]           log2 of the weight that exponents are relative to: the row's maximum, which it may lag behind by LAG, which spares most rescalings
// Copies: with STAGES == 1 the values of a tile arrive while its scores are computed and the keys of the next one during softmax and P V (two barriers a tile);
// with STAGES == 2 both arrive a tile ahead (one barrier a tile: after it nobody reads the other stage any more).
constexpr int THREADS = WARPS * 32, WARP_ROWS = BLOCK_Q / WARPS, M = WARP_ROWS / 16, ROWS = 2 * M, N = BLOCK_KV / 8, N_V = DIM_V / 8;
constexpr int WINDOW = 128;            // tiles that are classified at a time, each by one lane, so that no code for it burdens the loop
constexpr float LAG = 8.0f;            // log2; P then reaches 256, which T holds as exactly as 1
constexpr float LOWEST = -3.4028235e38f;  // below every score but -inf, whose weight is then 0 without a special case

struct Smem {
  union {
    fg::Tile<BLOCK_Q, DIM_QK> q;
    fg::Tile<BLOCK_Q, DIM_V> out;
  };
  fg::Tile<BLOCK_KV, DIM_QK> k[STAGES];
  fg::Tile<BLOCK_KV, DIM_V> v[STAGES];
  alignas(128) const T* volatile keys;  // addresses of the head's first key and value: needed once a tile, they are not worth registers in between
  const T* volatile values;
  alignas(16) unsigned char kinds[WINDOW][WARPS];  // classes of the tiles window_first, window_first + 1 ..., for each warp (variants with a mask)
};
static_assert(sizeof(Smem) == SMEM_BYTES, "tiler and kernel disagree");

// P V has no notion of a masked key: 0 * NaN is NaN. Such output rows are rare and recognised afterwards; this computes one of them exactly, with one warp.
__device__ __forceinline__ void repair_row(const Params& p, const Item& at, const Uniform& u, int b, int h, int q, fg::Range seen, float multiplier, float offset, float weight, long long out_offset) {
  constexpr int STEPS_QK = (HEAD_DIM_QK + 31) / 32, STEPS_V = (HEAD_DIM_V + 31) / 32;
  const int lane = threadIdx.x % 32;
  const T* const query = p.q + b * p.q_stride_b + h * p.q_stride_h + (at.q_start + q) * p.q_stride_l;
  const T* const keys = p.k + b * p.k_stride_b + h / GROUP * p.k_stride_h + at.k_start * p.k_stride_l;
  const T* const values = p.v + b * p.v_stride_b + h / GROUP * p.v_stride_h + at.k_start * p.v_stride_l;
  const Row row_q = row(p, u, q);
  float acc[STEPS_V] = {};
#pragma unroll 1
  for (int k = seen.begin; k < seen.end; ++k) {
    const Col col_k = col(p, u, k);
    if (!mask(p, u, row_q, col_k, q, k)) continue;
    float s = 0.0f;
#pragma unroll
    for (int i = 0; i < STEPS_QK; ++i) {
      const int d = i * 32 + lane;
      if (d < HEAD_DIM_QK) s += fg::to_real(query[d]) * fg::to_real(keys[k * p.k_stride_l + d]);
    }
    s = fg::warp_sum(s);
    const float probability = fg::exp2_fast(s * multiplier - offset) * weight;
#pragma unroll
    for (int i = 0; i < STEPS_V; ++i) {
      const int d = i * 32 + lane;
      if (d < HEAD_DIM_V) acc[i] += probability * fg::to_real(values[k * p.v_stride_l + d]);
    }
  }
#pragma unroll
  for (int i = 0; i < STEPS_V; ++i) {
    const int d = i * 32 + lane;
    if (d >= HEAD_DIM_V) continue;
    p.out[out_offset + d] = fg::from_real<T>(acc[i]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) forward(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  const fg::Work work = fg::work_of_block(blockIdx.x, (p.q_len + BLOCK_Q - 1) / BLOCK_Q, p.batch * p.heads, p.kv_len * 2ll * (DIM_QK + DIM_V) / GROUP, SECTION_BYTES);
  const int b = fg::same_in_warp(work.head / p.heads), h = work.head - b * p.heads, q_first = work.tile * BLOCK_Q;
  const Item at = item(p, b);
  const int q_len = at.lens.q_len, kv_len = at.lens.kv_len;
  if (q_first >= q_len) return;
  const int q_last = min(q_first + BLOCK_Q, q_len) - 1, warp_first = q_first + warp * WARP_ROWS, own_first = warp_first + lane / 4;
  const Uniform u = uniform(p, at.lens, b, h);
  Row rows[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) rows[r] = row(p, u, own_first + r * 8);

  if (threadIdx.x == 0) {
    smem.keys = p.k + b * p.k_stride_b + h / GROUP * p.k_stride_h + at.k_start * p.k_stride_l;
    smem.values = p.v + b * p.v_stride_b + h / GROUP * p.v_stride_h + at.k_start * p.v_stride_l;
  }
  __syncthreads();
  const fg::Range seen = kv_range(p, u, q_first, q_last);
  const int first = seen.begin / BLOCK_KV;

  int window_first = 0x7fffffff;
  auto classify = [&](int last) {  // the WINDOW of tiles that ends with `last`
    window_first = max(first, last - WINDOW + 1);
    const int warp_last = min(warp_first + WARP_ROWS, q_len) - 1;
    for (int tile = window_first + lane; tile <= last; tile += 32) {
      int kind = warp_first > warp_last ? fg::EMPTY : tile_class(p, u, warp_first, warp_last, tile * BLOCK_KV, min((tile + 1) * BLOCK_KV, kv_len) - 1);
      if (kind == fg::FULL && (tile + 1) * BLOCK_KV > kv_len) kind = fg::PARTIAL;
      smem.kinds[tile - window_first][warp] = kind;
    }
  };
  // The next tile below `tile` that holds a visible key, -1 if there is none. All threads of the block call it together.
  auto next_below = [&](int tile) {
    while (--tile >= first) {
      if (tile < window_first) {
        __syncthreads();
        classify(tile);
        __syncthreads();
      }
      if (*reinterpret_cast<const fg::Word<WARPS>*>(smem.kinds[tile - window_first]) == 0) continue;
      return tile;
    }
    return -1;
  };
  auto load_keys = [&](int tile, int stage) {
    fg::load_tile<THREADS, HEAD_DIM_QK, ALIGNED>(smem.k[stage], smem.keys, p.k_stride_l, tile * BLOCK_KV, kv_len);
  };
  auto load_values = [&](int tile, int stage) {
    fg::load_tile<THREADS, HEAD_DIM_V, ALIGNED>(smem.v[stage], smem.values, p.v_stride_l, tile * BLOCK_KV, kv_len);
  };

  float out[M][N_V][4], offset[ROWS], sum[ROWS];
  fg::clear(out);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    offset[r] = LOWEST;
    sum[r] = 0.0f;
  }
  // Exponents are exp2(score * multiplier - offset).
  const float multiplier = p.scale * (float)fg::LOG2E;
  int tile = next_below((seen.end + BLOCK_KV - 1) / BLOCK_KV), stage = 0;
  if (tile >= 0) {
    fg::load_tile<THREADS, HEAD_DIM_QK, ALIGNED>(smem.q, p.q + b * p.q_stride_b + h * p.q_stride_h + at.q_start * p.q_stride_l, p.q_stride_l, q_first, q_len);
    load_keys(tile, 0);
    if constexpr (STAGES == 2) load_values(tile, 0);
  }
  fg::copy_commit();
  const auto q_lane = fg::lane_down(smem.q, warp * WARP_ROWS);
  const auto k_lane = fg::lane_across(smem.k[0], 0);
  const auto v_lane = fg::lane_down(smem.v[0], 0);
  unsigned q_operand[Q_IN_REGISTERS ? DIM_QK / 16 : 1][M][4];
  if constexpr (Q_IN_REGISTERS) {
    fg::copy_wait<0>();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < DIM_QK / 16; ++k)
#pragma unroll
      for (int m = 0; m < M; ++m) fg::load_matrices(q_operand[k][m], q_lane.step(m * 16, k * 2));
  }

#pragma unroll 1
  while (tile >= 0) {
    const int kind = smem.kinds[tile - window_first][warp];
    const bool active = kind != fg::EMPTY;
    const int next = next_below(tile);
    fg::copy_wait<0>();
    __syncthreads();
    if constexpr (STAGES == 1) {
      load_values(tile, 0);
      fg::copy_commit();
    } else {
      if (next >= 0) {
        load_keys(next, stage ^ 1);
        load_values(next, stage ^ 1);
      }
      fg::copy_commit();
    }
    float acc[M][N][4];
    if (active) {
      fg::clear(acc);
      const auto k_stage = k_lane.shifted(stage * sizeof(smem.k[0]));
      if constexpr (Q_IN_REGISTERS) fg::multiply<T, true>(acc, q_operand, k_stage);
      else fg::multiply<T, DIM_QK / 16, false, true, UNROLL>(acc, q_lane, k_stage);
    }
    if (STAGES == 1) {
      fg::copy_wait<0>();
      __syncthreads();
      if (next >= 0) load_keys(next, 0);
      fg::copy_commit();
    }

    if (active) {
      const int own_k = tile * BLOCK_KV + lane % 4 * 2;
      if (kind == fg::PARTIAL) {
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int k = own_k + n * 8 + e;
            const Col col_k = col(p, u, k);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
              const bool visible = k < kv_len && mask(p, u, rows[r], col_k, own_first + r * 8, k);
              if (!visible) acc[r / 2][n][r % 2 * 2 + e] = -fg::infinity<float>();
            }
          }
      }

      float top[ROWS];
      bool lags = false;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        top[r] = acc[r / 2][0][r % 2 * 2];
#pragma unroll
        for (int n = 0; n < N; ++n) top[r] = fmaxf(top[r], fmaxf(acc[r / 2][n][r % 2 * 2], acc[r / 2][n][r % 2 * 2 + 1]));
        lags |= top[r] * multiplier - offset[r] > LAG;
      }
      if (__any_sync(fg::ALL_LANES, lags)) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          const float before = offset[r];
          offset[r] = fmaxf(before, fg::quad_max(top[r]) * multiplier);
          const float factor = fg::exp2_fast(before - offset[r]);
          sum[r] *= factor;
#pragma unroll
          for (int n = 0; n < N_V; ++n) {
            out[r / 2][n][r % 2 * 2] *= factor;
            out[r / 2][n][r % 2 * 2 + 1] *= factor;
          }
        }
      }

      const auto v_stage = v_lane.shifted(stage * sizeof(smem.v[0]));
#pragma unroll
      for (int k = 0; k < BLOCK_KV / 16; ++k) {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
          for (int n = 2 * k; n < 2 * k + 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int r = 2 * m + e / 2;
              acc[m][n][e] = fg::exp2_fast(acc[m][n][e] * multiplier - offset[r]);
              sum[r] += acc[m][n][e];
            }
        unsigned probabilities[M][4];
        fg::pack_operand<T>(probabilities, acc, k);
#pragma unroll
        for (int n = 0; n < N_V; n += 2) {
          unsigned v[4];
          fg::load_matrices_transposed(v, v_stage.step(k * 16, n));
          fg::mma_row<T>(out, probabilities, v, n);
        }
      }
    }
    tile = next;
    if constexpr (STAGES == 2) stage ^= 1;
  }

  // The rows' sums, lse and the factor of their outputs.
  float weight[ROWS];
  const float sink = p.sink[h] * (float)fg::LOG2E;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    sum[r] = fg::quad_sum(sum[r]);
    const bool empty = sum[r] == 0.0f;
    const float most = empty ? sink : fmaxf(offset[r], sink), base = most == -fg::infinity<float>() ? 0.0f : most;
    const float scaled = empty ? 0.0f : fg::exp2_fast(offset[r] - base), total = sum[r] * scaled + fg::exp2_fast(sink - base);
    weight[r] = empty ? 0.0f : scaled / total;
    const float lse = (base + fg::log2_fast(total)) * (float)fg::LN2;
    const int q = own_first + r * 8;
    if (lane % 4 == 0 && q < q_len) {
      p.lse[b * p.lse_stride_b + h * p.lse_stride_h + at.q_start + q] = lse;
    }
  }
  unsigned broken = 0;  // bit r: a row that must be repaired. A NaN in the sum comes from a score and is the row's right answer.
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    float check = 0.0f;  // becomes NaN if any output is not finite
#pragma unroll
    for (int n = 0; n < N_V; ++n) check += out[r / 2][n][r % 2 * 2] * 0.0f + out[r / 2][n][r % 2 * 2 + 1] * 0.0f;
    if (check != check && sum[r] == sum[r] && sum[r] != 0.0f && own_first + r * 8 < q_len) broken |= 1u << r;
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int n = 0; n < N_V; ++n)
#pragma unroll
      for (int e = r % 2 * 2; e < r % 2 * 2 + 2; ++e) out[r / 2][n][e] = weight[r] == 0.0f ? 0.0f : out[r / 2][n][e] * weight[r];
  __syncthreads();  // all warps have read their queries
  fg::store_accumulators<T>(fg::lane_own(smem.out, warp * WARP_ROWS), out);
  __syncthreads();
  const long long out_offset = b * p.out_stride_b + h * p.out_stride_h + (at.q_start + q_first) * p.out_stride_l;
  fg::store_tile<THREADS, HEAD_DIM_V, ALIGNED>(p.out + out_offset, p.out_stride_l, q_len - q_first, smem.out);
  if (__syncthreads_or(broken)) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      unsigned lanes = __ballot_sync(fg::ALL_LANES, broken >> r & 1);
      while (lanes) {
        const int quad = (__ffs(lanes) - 1) / 4, q = warp_first + r * 8 + quad;
        const float row_offset = __shfl_sync(fg::ALL_LANES, offset[r], quad * 4), row_weight = __shfl_sync(fg::ALL_LANES, weight[r], quad * 4);
        repair_row(p, at, u, b, h, q, seen, multiplier, row_offset, row_weight, out_offset + (q - q_first) * p.out_stride_l);
        lanes &= ~(0xfu << quad * 4);
      }
    }
  }
}
