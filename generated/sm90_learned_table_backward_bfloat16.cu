// Attention backward written by flashgen: sm90a, bfloat16, head dims 64/64, family sm90.
// No mask: every tile is full.
// Score: a * s + c, 6 operations per pair, 1 of them loads.

#include "fg/base.h"
#include "fg/interval.h"

using real = float;        // scores, statistics, captured floats
using T = fg::bf16;  // q, k, v, out

constexpr int HEAD_DIM_QK = 64;
constexpr int HEAD_DIM_V = 64;
constexpr int GROUP = 1;  // query heads per kv head
constexpr int BLOCK_KV = 128;
constexpr int BLOCK_Q = 64;
constexpr int COLUMNS_QK = 32;
constexpr int COLUMNS_V = 64;
constexpr int CONSUMER_REGISTERS = 232;
constexpr int DIAGONALS = 1;
constexpr int DIM_QK = 64;
constexpr int DIM_V = 64;
constexpr int DK_REGISTERS = 32;
constexpr int DQ_BLOCK_KV = 64;
constexpr int DQ_BLOCK_Q = 128;
constexpr int DQ_BY_ROWS = 0;
constexpr int DQ_COLUMNS = 32;
constexpr int DQ_REGISTERS = 16;
constexpr int DQ_SCORE_REGISTERS = 32;
constexpr int DQ_SMEM_BYTES = 58368;
constexpr int DQ_STAGED = 1;
constexpr int DQ_SUMMED = 1;
constexpr int DV_REGISTERS = 32;
constexpr int KV_STAGES = 1;
constexpr int LATE = 0;
constexpr int LISTED = 0;
constexpr int ORDERED = 0;
constexpr int OVERLAP = 1;
constexpr int PERSISTENT = 0;
constexpr int PRODUCER_REGISTERS = 40;
constexpr int SCORE_REGISTERS = 32;
constexpr int SECTION_BYTES = 0;
constexpr int SMEM_BYTES = 116736;
constexpr int SMS = 132;
constexpr int STAGES = 2;
constexpr int SUM_BYTES = 16777216;
constexpr int SUM_SLOTS = 3;
constexpr int WIDE = 0;

#include "fg/math.cuh"
#include "fg/blocks.cuh"
#include "fg/sm80/grad.cuh"
#include "fg/sm90/backward.cuh"
#include "fg/sm90/layout.cuh"
#include "fg/sm90/ptx.cuh"
#include "fg/sm90/rows.cuh"
#include "fg/sm90/schedule.cuh"

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

// d (64 x 32) = a b, or += with `accumulate`: both operands in shared memory, the depth of the product along a's rows and down b's.
__device__ __forceinline__ void multiply_dq(float (&d)[16], fg::Descriptor a, fg::Descriptor b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, %16, %17, p, 1, 1, 0, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b), "r"(accumulate));
}

// d (64 x 64) += a b: a in registers, b in shared memory, the depth of the product down its rows.
__device__ __forceinline__ void add_dv(float (&d)[32], unsigned a0, unsigned a1, unsigned a2, unsigned a3, fg::Descriptor b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, { %32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

// d (64 x 64) += a b: a in registers, b in shared memory, the depth of the product down its rows.
__device__ __forceinline__ void add_dk(float (&d)[32], unsigned a0, unsigned a1, unsigned a2, unsigned a3, fg::Descriptor b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, { %32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

struct Params {
  fg::TensorMap map_q;
  fg::TensorMap map_k;
  fg::TensorMap map_v;
  fg::TensorMap map_dout;
  fg::TensorMap map_dk;
  fg::TensorMap map_dv;
  const T* q;
  const T* k;
  const T* v;
  const T* out;
  const T* dout;
  T* dq;
  T* dk;
  T* dv;
  const real* lse;
  const T* out_low;
  const real* dlse;
  real* delta;
  const float* capture_0;
  real* grad_0;
  float* statistics;
  float* dq_sum;
  int* progress;
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
  int kv_tiles;
  int section;
  int sum_heads;
  int sum_sections;
  int finish_blocks;
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

// s is scale * (q . k)
FG_FN real score(const Params& p, const Uniform& u, const Row& r, const Col& c, real s, int q, int k) {
  const real t0 = real(fg::to_real(p.capture_0[fg::clamp_index(u.h, p.capture_0_size_0) * p.capture_0_stride_0 + fg::clamp_index(fg::int_min(fg::int_max(r.r0 - k, p.int_0), p.int_1) + p.int_2, p.capture_0_size_1) * p.capture_0_stride_1]));
  return s + t0;
}

// the score and d score / d s
FG_FN void score_grad(const Params& p, const Uniform& u, const Row& r, const Col& c, real s, int q, int k, real& value, real& slope) {
  const real t0 = real(fg::to_real(p.capture_0[fg::clamp_index(u.h, p.capture_0_size_0) * p.capture_0_stride_0 + fg::clamp_index(fg::int_min(fg::int_max(r.r0 - k, p.int_0), p.int_1) + p.int_2, p.capture_0_size_1) * p.capture_0_stride_1]));
  value = s + t0;
  slope = 1.0f;
}

// adds dscore * d score / d capture to the gradients of captured tensors
FG_FN void capture_grads(const Params& p, const Uniform& u, const Row& r, const Col& c, real s, int q, int k, real dscore) {
  fg::grad_add(p.grad_0 + ((long long)fg::clamp_index(u.h, p.capture_0_size_0) * p.capture_0_size_1 + fg::clamp_index(fg::int_min(fg::int_max(r.r0 - k, p.int_0), p.int_1) + p.int_2, p.capture_0_size_1)), dscore);
}

// keys that rows q_first..q_last can see
FG_FN fg::Range kv_range(const Params& p, const Uniform& u, int q_first, int q_last) {
  return fg::Range{0, u.lens.kv_len};
}

// rows that keys k_first..k_last can be seen by
FG_FN fg::Range q_range(const Params& p, const Uniform& u, int k_first, int k_last) {
  return fg::Range{0, u.lens.q_len};
}

// With P = exp(score - lse), dP = dO V^T and delta = rowsum(dO * O) - dlse:
//   dV = P^T dO     dS = P * (dP - delta) * d score / d s     dK = scale dS^T Q     dQ = scale dS K

// exp(score - lse) = exp2(score * multiplier - lse * log2 e); a row without keys has lse = -inf and no probabilities.
FG_FN float log2_sum(float lse) { return lse == -fg::infinity<float>() ? fg::infinity<float>() : lse * (float)fg::LOG2E; }

// Rows of the tensor `name` that belong to (b, h), from the item's first one on.
#define FG_ROWS(name, b, h, start) (p.name + (b) * p.name##_stride_b + (h) * p.name##_stride_h + (start) * p.name##_stride_l)

// Which of the tiles of all rows and heads one is.
FG_FN long long row_tile(const Params& p, int b, int h, int tile) { return ((long long)b * p.heads + h) * p.q_tiles + tile; }
// dQ is summed for SUM_SLOTS sections of p.sum_heads kv heads at a time, whose sums stay in L2; the next section's lie where those of the first of them lay.
// The float32 sum of a q tile's dQ, in the order of the accumulators that are added to it: warpgroup, four registers, thread. place: of a head among the slots.
FG_FN float* dq_sum_tile(const Params& p, int place, int tile) { return p.dq_sum + ((long long)place * p.q_tiles + tile) * (BLOCK_Q * DIM_QK); }
// Statistics of the nth q tile, and zeros where dQ is first summed, by the first PREPARE_THREADS of COUNT threads.
constexpr int PREPARE_THREADS = 256;
template <int COUNT> FG_FN void prepare(const Params& p, unsigned nth) {
  if (COUNT > PREPARE_THREADS && threadIdx.x >= PREPARE_THREADS) return;
  constexpr int CHUNKS = HEAD_DIM_V / 8, LANES = CHUNKS > 16 ? 32 : CHUNKS > 8 ? 16 : CHUNKS > 4 ? 8 : 4;  // lanes of a row; with 4, PREPARE_THREADS have 64

  const int tile = nth % p.q_tiles, b = nth / p.q_tiles / p.heads, h = nth / p.q_tiles % p.heads, q_len = p.q_len;
  const T* const out = FG_ROWS(out, b, h, 0);
  const T* const dout = FG_ROWS(dout, b, h, 0);
  float* const statistics = p.statistics + row_tile(p, b, h, tile) * (2 * BLOCK_Q);
#pragma unroll
  for (int n = 0; n < BLOCK_Q * LANES / PREPARE_THREADS; ++n) {
    const int i = n * (PREPARE_THREADS / LANES) + threadIdx.x / LANES, q = tile * BLOCK_Q + i;
    float sum = 0.0f;
    if (q < q_len) {
#pragma unroll
      for (int chunk = threadIdx.x % LANES; chunk < CHUNKS; chunk += LANES) {
        const uint4 gradient = *reinterpret_cast<const uint4*>(dout + q * p.dout_stride_l + chunk * 8);
        sum += fg::dot_chunk<T>(*reinterpret_cast<const uint4*>(out + q * p.out_stride_l + chunk * 8), gradient);
        sum += fg::dot_chunk<T>(*reinterpret_cast<const uint4*>(p.out_low + (out - p.out) + q * p.out_stride_l + chunk * 8), gradient);
      }
    }
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) sum += __shfl_xor_sync(fg::ALL_LANES, sum, step);
    if (threadIdx.x % LANES == 0) {
      float lse = fg::infinity<float>();
      if (q < q_len) {
        const long long index = b * p.lse_stride_b + h * p.lse_stride_h + q;
        sum -= p.dlse[index];
        p.delta[index] = sum;
        lse = log2_sum(p.lse[index]);
      }
      statistics[i] = lse;
      statistics[BLOCK_Q + i] = sum;
    }
  }
  if (nth == 0)
    for (int i = threadIdx.x; i < 2 * p.sum_sections; i += PREPARE_THREADS) p.progress[i] = 0;
  const int place = b * p.heads + h;
  if (place >= SUM_SLOTS * p.sum_heads * GROUP) return;
  float4* const zeroed = reinterpret_cast<float4*>(dq_sum_tile(p, place, tile));
#pragma unroll
  for (int i = 0; i < BLOCK_Q * DIM_QK / 4; i += PREPARE_THREADS) zeroed[i + threadIdx.x] = float4{0.0f, 0.0f, 0.0f, 0.0f};
}

// The last tiles first, so that the sums of the first section, which come last, are still in L2.
extern "C" __global__ void __launch_bounds__(PREPARE_THREADS) backward_prepare(const __grid_constant__ Params p) { prepare<PREPARE_THREADS>(p, gridDim.x - 1 - blockIdx.x); }
// A q tile of the walk over those of all query heads of a group, in one word: is something in it hidden, is it the last one, query head and tile. Negative: there is none.
constexpr int PARTIAL_TILE = 1, LAST_TILE = 2;
__device__ __forceinline__ int describe(int head, int tile) { return (tile * GROUP + head) * 4; }
__device__ __forceinline__ int head_of(int described) { return described / 4 % GROUP; }
__device__ __forceinline__ int tile_of(int described) { return described / 4 / GROUP; }

// backward_main: a block owns BLOCK_KV keys of one kv head and walks over the q tiles of all query heads of its group; dK and dV stay in registers.
// Warpgroup 0 is the producer: its first warp chooses the tiles and loads them by TMA, its second one adds finished tiles of dQ to the sum. Warpgroups 1 and 2 are the consumers: 64 keys each.
// Glossary:
//   b, h, kv_head      batch item, query head, kv head
//   s[4 j + 2 r + e]   score of key r * 8 + g of the warp's 16 and query 8 j + 2 c + e, with g = lane / 4, c = lane % 4: wgmma's accumulator of S^T; then the
//                      probability. dp, likewise: dP^T, then d score. Both are, packed in pairs, the left operands of dV and dK
//   statistics         of a tile's queries: lse in log2 units (+inf for a row without keys: its probabilities are 0), and delta
//   dq                 what this block adds to the tile's dQ: a warpgroup has all 64 rows, DQ_COLUMNS columns. dS crosses between the warpgroups through shared memory
// Barriers (full: the TMA's bytes and the producer's arrival; empty: lane 0 of each consumer warp):
//   k_full, v_full     the block's own keys and values, once
//   q_full, q_empty    a tile of queries, its statistics, and its description in `tiles`
//   dout_full, ..empty a tile of dO
//   ds_full, ds_empty  a tile of dS, for those who sum its diagonals
// Whoever fills waits for "empty" with the parity of the round before (a fresh barrier lets it pass), whoever reads waits for "full" with that of this round.

constexpr int THREADS = 384;
constexpr int SCORES = SCORE_REGISTERS, PAIRS = SCORES / 2;  // registers of a thread
constexpr int BOTH_BARRIER = 1;                              // named barriers: of the consumers
constexpr int OWN_BARRIER = 2;                               // of a consumer warpgroup each (2, 3)
constexpr int DQ_READY = 4, DQ_FREE = 6;                     // one for each warpgroup's part of the staged dQ, with the warp that adds it to the sum
struct alignas(1024) Smem {
  T k[BLOCK_KV * DIM_QK];  // at the end dK
  T v[BLOCK_KV * DIM_V];   // at the end dV
  T q[STAGES][BLOCK_Q * DIM_QK];
  T dout[STAGES][BLOCK_Q * DIM_V];
  T ds[STAGES][BLOCK_Q * BLOCK_KV];  // a warpgroup's keys are one block of columns
  float dq[BLOCK_Q * DIM_QK];
  float statistics[STAGES][2][BLOCK_Q];
  fg::Barrier k_full, v_full, q_full[STAGES], q_empty[STAGES], dout_full[STAGES], dout_empty[STAGES];
  fg::Barrier ds_full[STAGES], ds_empty[STAGES];
  int tiles[STAGES];  // see describe
  int ds_tiles[STAGES];  // whose dS it is; < 0: no more
  int dq_tiles[2];  // which tile's a warpgroup's part of dq is, see describe; < 0: there is none at all
};
static_assert(sizeof(Smem) == SMEM_BYTES, "tiler and kernel disagree");

// dQ of 64 rows by one warpgroup, a warp's 16 rows each: the float32 sum, times scale, rounded to T. A thread reads what its likes in both warpgroups added.
__device__ __forceinline__ void round_dq(const Params& p, float* from, int b, int h, int q_start, int q_len, int first_row, bool again) {
  constexpr int SUMS = DIM_QK / 2, PARTS = SUMS / DQ_REGISTERS;  // registers of a thread, and the warpgroups that added them
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, q = first_row + warp * 16 + lane / 4;
  float4* const sum = reinterpret_cast<float4*>(from) + threadIdx.x % 128;
  T* const to = FG_ROWS(dq, b, h, q_start);
  float4 x[SUMS / 4];
#pragma unroll
  for (int i = 0; i < SUMS / 4; ++i) x[i] = fg::load_l2(sum + i * 128);
#pragma unroll
  for (int part = 0; part < PARTS; ++part)
#pragma unroll
    for (int i = 0; i < DQ_REGISTERS; i += 16) {
      unsigned y[2][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float4 four = i + 4 * j < DQ_REGISTERS ? x[(part * DQ_REGISTERS + i) / 4 + j] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        y[0][j] = fg::pack<T>(four.x * p.scale, four.y * p.scale);
        y[1][j] = fg::pack<T>(four.z * p.scale, four.w * p.scale);
      }
      const int own = i * 2 + lane % 4 * 8, d = part * DQ_COLUMNS + own;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint4 columns = fg::quad_transpose(y[r][0], y[r][1], y[r][2], y[r][3], lane);
        if (q + r * 8 < q_len && own < DQ_COLUMNS && d < HEAD_DIM_QK) *reinterpret_cast<uint4*>(to + (q + r * 8) * p.dq_stride_l + d) = columns;
      }
    }
  if (again) {
#pragma unroll
    for (int i = 0; i < SUMS / 4; ++i) sum[i * 128] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

// Blocks in the order in which they start: over the keys of one section after the other, and at the end those that round dQ of the last LAG sections; dQ of the others is
// rounded by the blocks over the keys LAG sections later, while these wait for their own keys. Nobody waits for a block that starts later: a section's sums are
// complete once all its blocks over keys have added (`progress[section]` counts them).
// backward_prepare clears the sums of the first SUM_SLOTS sections; those of a later one are free, and zero, once what lay there has been rounded
// (`progress[sum_sections + section]` counts the warpgroups that have rounded a section's).
constexpr int LAG = SUM_SLOTS - 1;
__device__ __forceinline__ int heads_of(const Params& p, int section) { return min(p.sum_heads, p.batch * p.kv_heads - section * p.sum_heads); }
__device__ __forceinline__ int parts_of(const Params& p, int section) { return heads_of(p, section) * GROUP * p.q_tiles * (BLOCK_Q / 64); }  // of 64 rows
// How many parts of a section each block over the keys of a later one rounds, where these have that many heads.
__device__ __forceinline__ int share_of(const Params& p, int section, int heads) { return (parts_of(p, section) + heads * p.kv_tiles - 1) / (heads * p.kv_tiles); }
// Where the sums of a section's nth part lie.
__device__ __forceinline__ float* part_sums(const Params& p, int section, int nth) {
  return dq_sum_tile(p, section % SUM_SLOTS * p.sum_heads * GROUP, 0) + (long long)nth * (64 * DIM_QK);
}

// dQ of a part of a section.
__device__ __forceinline__ void round_part(const Params& p, int section, int nth, bool again) {
  const int rows = nth % (BLOCK_Q / 64), index = nth / (BLOCK_Q / 64), place = index / p.q_tiles, tile = index - place * p.q_tiles;
  const int head = section * p.sum_heads * GROUP + place, b = head / p.heads, h = head - b * p.heads;
  round_dq(p, part_sums(p, section, nth), b, h, 0, p.q_len, tile * BLOCK_Q + rows * 64, again);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_main(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);

  if (p.prepare_blocks) {  // else backward_prepare has run
    if (blockIdx.x < p.prepare_blocks) {
      prepare<THREADS>(p, blockIdx.x);
      fg::blocks_arrive(p.arrived);
      return;
    }
    fg::blocks_wait(p.arrived, p.prepare_blocks);
  }
  if (p.prepare_blocks) fg::async_proxy_fence_global();  // after ordinary stores of others
  const int group = __shfl_sync(fg::ALL_LANES, threadIdx.x / 128, 0) - 1, warp = __shfl_sync(fg::ALL_LANES, threadIdx.x / 32 % 4, 0), lane = threadIdx.x % 32;

  const int nth = blockIdx.x - p.prepare_blocks;
  const int rounding = nth - p.sum_sections * p.sum_heads * p.kv_tiles;  // which block of those that only round dQ
  if (rounding >= 0) {
    const int section = max(p.sum_sections - LAG, 0) + rounding / p.finish_blocks, part = rounding % p.finish_blocks * (THREADS / 128) + threadIdx.x / 128;
    if (threadIdx.x == 0) fg::wait_turn(p.progress + section, heads_of(p, section) * p.kv_tiles);
    __syncthreads();
    if (part < parts_of(p, section)) round_part(p, section, part, false);
    return;
  }

  const int over_keys = p.sum_heads * p.kv_tiles, section = nth / over_keys, index = nth - section * over_keys;
  const int here = heads_of(p, section), first_head = section * p.sum_heads;
  const fg::Work work = fg::nth_longest(index, p.kv_tiles, here, p.section);
  const int place = (section % SUM_SLOTS * p.sum_heads + work.head) * GROUP;  // of the first query head among the sums of dQ
  const int k_first = (p.kv_tiles - 1 - work.tile) * BLOCK_KV;
  const int b = (first_head + work.head) / p.kv_heads, kv_head = first_head + work.head - b * p.kv_heads;
  const Lens lens = item(p, b).lens;
  if (index >= here * p.kv_tiles) return;
  if (threadIdx.x == 0) {
    fg::barrier_init(smem.k_full, 1);
    fg::barrier_init(smem.v_full, 1);
    for (int i = 0; i < STAGES; ++i) {
      fg::barrier_init(smem.q_full[i], 1);
      fg::barrier_init(smem.q_empty[i], 8);
      fg::barrier_init(smem.dout_full[i], 1);
      fg::barrier_init(smem.dout_empty[i], 8);
      fg::barrier_init(smem.ds_full[i], 1);
      fg::barrier_init(smem.ds_empty[i], 2);
    }
    fg::barrier_init_fence();
  }
  __syncthreads();

  if (group < 0) {  // ---------------------------------------------------------------------------------------------------------------- producer
    fg::registers_lower<PRODUCER_REGISTERS>();
    if (warp == 0) {

      // A stride of 0 (one key for all batch items or heads) is none that a tensor map can have: it holds the one, and is asked for that.
      auto entry = [](int index, long long stride) { return stride != 0 ? index : 0; };
      const int k_last = min(k_first + BLOCK_KV, lens.kv_len) - 1;  // < k_first for keys beyond seqlens_k, whose gradients are 0
      if (lane == 0) {  // at once, while the tiles are looked for
        fg::barrier_expect(smem.k_full, sizeof(smem.k));
        fg::load_tile<DIM_QK, COLUMNS_QK, BLOCK_KV>(smem.k, p.map_k, smem.k_full, k_first, entry(kv_head, p.k_stride_h), entry(b, p.k_stride_b), fg::READ_ONCE);
        fg::barrier_expect(smem.v_full, sizeof(smem.v));
        fg::load_tile<DIM_V, COLUMNS_V, BLOCK_KV>(smem.v, p.map_v, smem.v_full, k_first, entry(kv_head, p.v_stride_h), entry(b, p.v_stride_b), fg::READ_ONCE);
      }
      fg::Ring<STAGES> ring;
      auto visit = [&](int described) {
        const int h = kv_head * GROUP + head_of(described), tile = tile_of(described), q_first = tile * BLOCK_Q;
        fg::barrier_wait(smem.q_empty[ring.slot], ring.parity ^ 1);
        if (lane == 0) {
          smem.tiles[ring.slot] = described;
          fg::barrier_expect(smem.q_full[ring.slot], sizeof(smem.q[0]) + sizeof(smem.statistics[0]));
          fg::load_tile<DIM_QK, COLUMNS_QK, BLOCK_Q>(smem.q[ring.slot], p.map_q, smem.q_full[ring.slot], q_first, entry(h, p.q_stride_h), entry(b, p.q_stride_b), fg::READ_AGAIN);
          fg::bulk_load(smem.statistics[ring.slot], p.statistics + row_tile(p, b, h, tile) * (2 * BLOCK_Q), sizeof(smem.statistics[0]), smem.q_full[ring.slot]);
        }
        fg::barrier_wait(smem.dout_empty[ring.slot], ring.parity ^ 1);
        if (lane == 0) {
          fg::barrier_expect(smem.dout_full[ring.slot], sizeof(smem.dout[0]));
          fg::load_tile<DIM_V, COLUMNS_V, BLOCK_Q>(smem.dout[ring.slot], p.map_dout, smem.dout_full[ring.slot], q_first, entry(h, p.dout_stride_h), entry(b, p.dout_stride_b), fg::READ_AGAIN);
        }
        ring.advance();
      };

      int found = -1;  // the tile found last: visited once it is known whether another one follows
#pragma unroll 1
      for (int head = 0; head < GROUP; ++head) {
        const Uniform u = uniform(p, lens, b, kv_head * GROUP + head);
        const fg::Range seen = k_last < k_first ? fg::Range{0, 0} : q_range(p, u, k_first, k_last);
        const int end = seen.begin < seen.end ? (seen.end + BLOCK_Q - 1) / BLOCK_Q : 0;

#pragma unroll 1
        for (int tile = seen.begin / BLOCK_Q; tile < end; ++tile) {
          bool partial = k_first + BLOCK_KV > lens.kv_len;
          partial |= (tile + 1) * BLOCK_Q > lens.q_len;  // else rows past q_len, zeros with an lse of +inf, come to nothing by themselves
          if (found >= 0) visit(found);
          found = describe(head, tile) | (partial ? PARTIAL_TILE : 0);
        }
      }
      if (found >= 0) {
        visit(found | LAST_TILE);
      } else if (lane == 0) {
        smem.tiles[0] = found;
        fg::barrier_arrive(smem.q_full[0]);
      }
    } else if (warp == 1) {
      constexpr int PART = BLOCK_Q * DIM_QK / 2;  // elements of a warpgroup's part
      if (lane == 0 && section >= SUM_SLOTS) fg::wait_turn(p.progress + p.sum_sections + section - SUM_SLOTS, 2 * p.kv_tiles * heads_of(p, section - 1));
      __syncwarp();
      fg::group_arrive(DQ_FREE, 160);
      fg::group_arrive(DQ_FREE + 1, 160);
#pragma unroll 1
      while (true) {
        int described;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          fg::group_sync(DQ_READY + half, 160);
          described = fg::shared_int(smem.dq_tiles[half]);
          if (lane == 0 && described >= 0) {
            float* const to = dq_sum_tile(p, place + head_of(described), tile_of(described)) + half * PART;
            fg::bulk_add(to, smem.dq + half * PART, PART * sizeof(float));
            fg::tma_store_commit();
          }
        }
        const bool last = fg::uniform(described < 0 || described & LAST_TILE);
        if (!last) {
          if (lane == 0) fg::bulk_wait_read<1>();
          __syncwarp();
          fg::group_arrive(DQ_FREE, 160);
          if (lane == 0) fg::bulk_wait_read<0>();
          __syncwarp();
          fg::group_arrive(DQ_FREE + 1, 160);
        }
        if (last) break;
      }
      if (lane == 0) {
        fg::tma_store_wait();  // all that this block adds is in the sums
        fg::end_turn(p.progress + section);
      }
    } else {

      // dS lies in shared memory as 16-bit pairs: queries in rows, keys 2 m and 2 m + 1 in column m. In step i lane l takes, of rows 2 i and 2 i + 1, the pair in column
      // m = (i - l) % 32: its diagonals q - k are 2 l - 1, 2 l and 2 l + 1, all 64 less while m > i. So its sums stay its own, and the odd ones are the next lane's as well.
      fg::Ring<STAGES> ring;
      const int keys = warp - 2;
#pragma unroll 1
      while (true) {
        fg::barrier_wait(smem.ds_full[ring.slot], ring.parity);
        const int described = fg::shared_int(smem.ds_tiles[ring.slot]);
        if (fg::uniform(described < 0)) break;
#pragma unroll 1
        for (int rows = 0; rows < BLOCK_Q; rows += 64) {
          const unsigned block = fg::shared_address(smem.ds[ring.slot]) + (keys * BLOCK_Q + rows) * 128;
          float below = 0.0f, on = 0.0f, above = 0.0f, below_far = 0.0f, on_far = 0.0f, above_far = 0.0f;
#pragma unroll 4
          for (int i = 0; i < 32; ++i) {
            if (i == lane) {  // from here on m <= i
              below_far = below, on_far = on, above_far = above;
              below = on = above = 0.0f;
            }
            const int m = (i - lane) & 31, row = 2 * i;
            const unsigned first = fg::shared_pair(block + row * 128 + ((m / 4 ^ row % 8) * 16 + m % 4 * 4));
            const unsigned second = fg::shared_pair(block + (row + 1) * 128 + ((m / 4 ^ (row + 1) % 8) * 16 + m % 4 * 4));
            below += fg::high_half<T>(first);
            on += fg::low_half<T>(first) + fg::high_half<T>(second);
            above += fg::low_half<T>(second);
          }
          const float from_next = __shfl_sync(fg::ALL_LANES, below, (lane + 1) % 32), from_next_far = __shfl_sync(fg::ALL_LANES, below_far, (lane + 1) % 32);
          above += lane < 31 ? from_next : 0.0f;
          above_far += lane < 31 ? from_next_far : from_next;
          const Uniform u = uniform(p, lens, b, kv_head * GROUP + head_of(described));
          const int k = k_first + keys * 64, q = tile_of(described) * BLOCK_Q + rows + 2 * lane;
          auto add = [&](int difference, float sum) { capture_grads(p, u, row(p, u, q + difference), col(p, u, k), 0.0f, q + difference, k, sum); };
          add(0, on);
          add(1, above);
          add(-64, on_far);
          add(-63, above_far);
        }
        if (lane == 0) fg::barrier_arrive(smem.ds_empty[ring.slot]);
        ring.advance();
      }
    }
    return;
  }
  // ------------------------------------------------------------------------------------------------------------------------------ consumers
  fg::registers_raise<CONSUMER_REGISTERS>();
  constexpr float multiplier = (float)fg::LOG2E;
  auto release = [&](fg::Barrier& empty) {
    if (lane == 0) fg::barrier_arrive(empty);
  };
  int own_k = k_first + group * 64 + warp * 16 + lane / 4;  // the thread's keys: this one and 8 further
  fg::Ring<STAGES> ring;
  float dv[DV_REGISTERS];
#pragma unroll
  for (int i = 0; i < DV_REGISTERS; ++i) dv[i] = 0.0f;
  float dk[DK_REGISTERS];
#pragma unroll
  for (int i = 0; i < DK_REGISTERS; ++i) dk[i] = 0.0f;
  // Lower halves of descriptors, of slot 0. As left operands keys and values are this warpgroup's 64 rows; "down": depth of the product down the rows.
  const unsigned k_low = fg::descriptor_low(fg::shared_address(smem.k) + group * 64 * COLUMNS_QK * 2, 16), q_low = fg::descriptor_low(fg::shared_address(smem.q), 16);
  const unsigned v_low = fg::descriptor_low(fg::shared_address(smem.v) + group * 64 * COLUMNS_V * 2, 16), dout_low = fg::descriptor_low(fg::shared_address(smem.dout), 16);
  constexpr unsigned Q_SLOT = sizeof(smem.q[0]) / 16, DOUT_SLOT = sizeof(smem.dout[0]) / 16;  // what descriptors grow by from slot to slot
  const unsigned q_down = fg::descriptor_low(fg::shared_address(smem.q), BLOCK_Q * COLUMNS_QK * 2);
  const unsigned dout_down = fg::descriptor_low(fg::shared_address(smem.dout), BLOCK_Q * COLUMNS_V * 2);
  const unsigned ds_low = fg::descriptor_low(fg::shared_address(smem.ds), 16);
  const unsigned k_down = fg::descriptor_low(fg::shared_address(smem.k) + group * DQ_COLUMNS * BLOCK_KV * 2, BLOCK_KV * COLUMNS_QK * 2);
  constexpr unsigned DS_SLOT = sizeof(smem.ds[0]) / 16;
  int head = 0;
  Uniform u = uniform(p, lens, b, kv_head * GROUP);
  Col cols[2] = {col(p, u, own_k), col(p, u, own_k + 8)};
  if (section >= LAG) {  // while keys and queries are on their way
    const int before = section - LAG, share = share_of(p, before, here), end = min((index + 1) * share, parts_of(p, before));
    if (threadIdx.x % 128 == 0) fg::wait_turn(p.progress + before, p.kv_tiles * heads_of(p, before));
    fg::group_sync(OWN_BARRIER + group, 128);
#pragma unroll 1
    for (int part = index * share + group; part < end; part += 2) round_part(p, before, part, before + SUM_SLOTS < p.sum_sections);
    fg::group_sync(OWN_BARRIER + group, 128);
    if (threadIdx.x % 128 == 0) {
      fg::end_turn(p.progress + p.sum_sections + before);
    }
  }
  fg::barrier_wait(smem.k_full, 0);
  fg::barrier_wait(smem.v_full, 0);
  auto describe_ds = [&]() {
    if (threadIdx.x == 128) {
      smem.ds_tiles[ring.slot] = fg::shared_int(smem.tiles[ring.slot]);
      fg::barrier_arrive(smem.ds_full[ring.slot]);
    }
  };
  // dQ of the tile whose dS is in a slot, once both warpgroups' are there; and its way to the sum.
  auto start_dq = [&](float (&dq)[DQ_REGISTERS], int slot) {
    fg::keep(dq);
    fg::wgmma_fence();
#pragma unroll
    for (int i = 0; i < BLOCK_KV / 16; ++i)
      multiply_dq(dq, fg::descriptor<64>(ds_low + slot * DS_SLOT) + fg::step_across<64, BLOCK_Q>(i), fg::descriptor<COLUMNS_QK>(k_down) + fg::step_down<COLUMNS_QK>(i), i != 0);
    fg::wgmma_commit();
  };
  auto add_dq = [&](const float (&dq)[DQ_REGISTERS], unsigned thread, int described) {
    fg::group_sync(DQ_FREE + group, 160);
    float4* const to = reinterpret_cast<float4*>(smem.dq) + group * (DQ_REGISTERS * 32) + thread % 128;
#pragma unroll
    for (int i = 0; i < DQ_REGISTERS; i += 4) to[i * 32] = make_float4(dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
    if (thread % 128 == 0) smem.dq_tiles[group] = described;
    fg::async_proxy_fence();
    fg::group_arrive(DQ_READY + group, 160);
  };
  fg::barrier_wait(smem.q_full[0], 0);
  bool more = fg::uniform(fg::shared_int(smem.tiles[0]) >= 0);
  if (!more) {
    fg::group_sync(DQ_FREE + group, 160);
    if (threadIdx.x % 128 == 0) smem.dq_tiles[group] = -1;
    __syncwarp();
    fg::group_arrive(DQ_READY + group, 160);
  }
#pragma unroll 1
  while (more) {
    fg::barrier_wait(smem.q_full[ring.slot], ring.parity);
    float s[SCORES], dp[SCORES];
    fg::keep(s);
    fg::wgmma_fence();
#pragma unroll
    for (int i = 0; i < DIM_QK / 16; ++i)
      multiply_scores(s, fg::descriptor<COLUMNS_QK>(k_low) + fg::step_across<COLUMNS_QK, BLOCK_KV>(i), fg::descriptor<COLUMNS_QK>(q_low + ring.slot * Q_SLOT) + fg::step_across<COLUMNS_QK, BLOCK_Q>(i), i != 0);
    fg::wgmma_commit();
    const int described = fg::shared_int(smem.tiles[ring.slot]);
    const bool is_partial = fg::uniform(described & PARTIAL_TILE);
    if (GROUP > 1 && fg::uniform(head_of(described) != head)) {
      head = head_of(described);
      u = uniform(p, lens, b, kv_head * GROUP + head);
      cols[0] = col(p, u, own_k);
      cols[1] = col(p, u, own_k + 8);
    }
    const int own_q = tile_of(described) * BLOCK_Q + lane % 4 * 2;
    fg::opaque(own_k);  // or the compiler keeps, and spills, what follows from it
    fg::barrier_wait(smem.dout_full[ring.slot], ring.parity);
    fg::keep(dp);
    fg::wgmma_fence();
#pragma unroll
    for (int i = 0; i < DIM_V / 16; ++i)
      multiply_scores(dp, fg::descriptor<COLUMNS_V>(v_low) + fg::step_across<COLUMNS_V, BLOCK_KV>(i), fg::descriptor<COLUMNS_V>(dout_low + ring.slot * DOUT_SLOT) + fg::step_across<COLUMNS_V, BLOCK_Q>(i), i != 0);
    fg::wgmma_commit();

    const float2* const lse = reinterpret_cast<const float2*>(smem.statistics[ring.slot][0]) + lane % 4;
    const float2* const delta = reinterpret_cast<const float2*>(smem.statistics[ring.slot][1]) + lane % 4;

    float slope[SCORES];
    auto exponentiate = [&]() {
#pragma unroll
      for (int i = 0; i < SCORES; i += 4) {
        const float2 lse_i = lse[i];
        if (i % 16 == 0) asm volatile("" ::: "memory");  // else all rows are loaded at once, into registers that are not there
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int q = own_q + i * 2 + e;
          const Row row_q = row(p, u, q);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float& x = s[i + 2 * r + e];
            float value;
            score_grad(p, u, row_q, cols[r], x * p.scale, q, own_k + r * 8, value, slope[i + 2 * r + e]);
            x = fg::approximate_exp2(value * multiplier - (e ? lse_i.y : lse_i.x));
          }
        }
      }
    };
    auto differentiate = [&]() {
#pragma unroll
      for (int i = 0; i < SCORES; i += 4) {
        const float2 delta_i = delta[i];
#pragma unroll
        for (int j = 0; j < 4; ++j) dp[i + j] = s[i + j] * (dp[i + j] - (j % 2 ? delta_i.y : delta_i.x)) * slope[i + j];
      }
    };
    fg::wgmma_wait<1>();
    fg::keep(s);
    exponentiate();  // while dP is being computed
    fg::wgmma_wait<0>();
    fg::keep(dp);
    differentiate();

    auto hide = [&]() {
#pragma unroll
      for (int i = 0; i < SCORES; i += 4)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int q = own_q + i * 2 + e;
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            bool visible = own_k + r * 8 < lens.kv_len;
            visible &= q < lens.q_len;
            if (!visible) s[i + 2 * r + e] = dp[i + 2 * r + e] = 0.0f;
          }
        }
    };
    if (is_partial) hide();
    unsigned weights[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) weights[i] = fg::pack<T>(s[2 * i], s[2 * i + 1]);
    unsigned gradients[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) gradients[i] = fg::pack<T>(dp[2 * i], dp[2 * i + 1]);
    // dS^T as dS to shared memory: a lane's address is that of query `row` of a matrix, 8 of the warpgroup's keys.
    unsigned thread = threadIdx.x;
    if (BLOCK_Q == 64) fg::opaque(thread);  // where registers are short, what follows from it is computed anew in every step
    const int staged_row = thread % 32 / 16 * 8 + thread % 8, staged_chunk = thread / 8 % 2 + thread / 32 % 4 * 2;
    fg::barrier_wait(smem.ds_empty[ring.slot], ring.parity ^ 1);
    const unsigned staged = fg::shared_address(smem.ds[ring.slot]) + fg::chunk_offset<64, BLOCK_Q>(staged_row, group * 8 + staged_chunk);
#pragma unroll
    for (int i = 0; i < BLOCK_Q / 16; ++i)  // 16 rows on, the swizzle is the same
      fg::store_matrices_transposed(staged + i * 16 * 128, gradients[4 * i], gradients[4 * i + 1], gradients[4 * i + 2], gradients[4 * i + 3]);
    fg::keep(dv);
    fg::wgmma_fence();
#pragma unroll
    for (int i = 0; i < BLOCK_Q / 16; ++i)
      add_dv(dv, weights[4 * i], weights[4 * i + 1], weights[4 * i + 2], weights[4 * i + 3], fg::descriptor<COLUMNS_V>(dout_down + ring.slot * DOUT_SLOT) + fg::step_down<COLUMNS_V>(i));
    fg::wgmma_commit();
    float dq[DQ_REGISTERS];
    fg::async_proxy_fence();
    fg::group_sync(BOTH_BARRIER, 256);  // both warpgroups' dS are there
    describe_ds();
    start_dq(dq, ring.slot);
    fg::wgmma_wait<1>();
    fg::keep(dv);
    release(smem.dout_empty[ring.slot]);
    fg::keep(dk);
    fg::wgmma_fence();
#pragma unroll
    for (int i = 0; i < BLOCK_Q / 16; ++i)
      add_dk(dk, gradients[4 * i], gradients[4 * i + 1], gradients[4 * i + 2], gradients[4 * i + 3], fg::descriptor<COLUMNS_QK>(q_down + ring.slot * Q_SLOT) + fg::step_down<COLUMNS_QK>(i));
    fg::wgmma_commit();
    fg::wgmma_wait<1>();
    fg::keep(dq);
    add_dq(dq, thread, fg::shared_int(smem.tiles[ring.slot]));  // again, which saves registers
    more = fg::uniform(!(fg::shared_int(smem.tiles[ring.slot]) & LAST_TILE));
    fg::wgmma_wait<0>();
    fg::keep(dk);
    release(smem.q_empty[ring.slot]);
    ring.advance();
  }
  if (threadIdx.x == 128) {
    fg::barrier_wait(smem.ds_empty[ring.slot], ring.parity ^ 1);
    smem.ds_tiles[ring.slot] = -1;
    fg::barrier_arrive(smem.ds_full[ring.slot]);
  }
  __syncwarp();
  // Through shared memory, over rows that only this warpgroup reads; TMA leaves out what lies past the tensor. Keys past kv_len have zero gradients.
  const unsigned staged_dv = fg::shared_address(smem.v);
#pragma unroll
  for (int i = 0; i < DV_REGISTERS; i += 8)
    fg::store_matrices(staged_dv + fg::chunk_offset<COLUMNS_V, BLOCK_KV>(group * 64 + warp * 16 + lane % 16, i / 4 + lane / 16), fg::pack<T>(dv[i], dv[i + 1]), fg::pack<T>(dv[i + 2], dv[i + 3]),
                       fg::pack<T>(dv[i + 4], dv[i + 5]), fg::pack<T>(dv[i + 6], dv[i + 7]));
  fg::async_proxy_fence();
  fg::group_sync(OWN_BARRIER + group, 128);
  if (threadIdx.x % 128 == 0) {
#pragma unroll
    for (int d = 0; d < DIM_V; d += COLUMNS_V) fg::tma_store(p.map_dv, smem.v + d * BLOCK_KV + group * 64 * COLUMNS_V, d, k_first + group * 64, kv_head, b);
    fg::tma_store_commit();
  }
  fg::group_sync(BOTH_BARRIER, 256);  // nobody reads the keys any more
  const unsigned staged_dk = fg::shared_address(smem.k);
#pragma unroll
  for (int i = 0; i < DK_REGISTERS; ++i) dk[i] *= p.scale;
#pragma unroll
  for (int i = 0; i < DK_REGISTERS; i += 8)
    fg::store_matrices(staged_dk + fg::chunk_offset<COLUMNS_QK, BLOCK_KV>(group * 64 + warp * 16 + lane % 16, i / 4 + lane / 16), fg::pack<T>(dk[i], dk[i + 1]), fg::pack<T>(dk[i + 2], dk[i + 3]),
                       fg::pack<T>(dk[i + 4], dk[i + 5]), fg::pack<T>(dk[i + 6], dk[i + 7]));
  fg::async_proxy_fence();
  fg::group_sync(OWN_BARRIER + group, 128);
  if (threadIdx.x % 128 == 0) {
#pragma unroll
    for (int d = 0; d < DIM_QK; d += COLUMNS_QK) fg::tma_store(p.map_dk, smem.k + d * BLOCK_KV + group * 64 * COLUMNS_QK, d, k_first + group * 64, kv_head, b);
    fg::tma_store_commit();
  }
  if (threadIdx.x % 128 == 0) fg::tma_store_wait_read();  // shared memory must outlive the copies
}
