// Attention backward written by flashgen: sm90a, bfloat16, head dims 64/64, family sm90, dropout, deterministic, varlen.
// No mask: every tile is full.

#include "fg/base.h"
#include "fg/interval.h"

using real = float;        // scores, statistics, captured floats
using T = fg::bf16;  // q, k, v, out

constexpr int HEAD_DIM_QK = 64;
constexpr int HEAD_DIM_V = 64;
constexpr int GROUP = 1;  // query heads per kv head
constexpr int BLOCK_KV = 128;
constexpr int BLOCK_Q = 128;
constexpr int COLUMNS_QK = 64;
constexpr int COLUMNS_V = 64;
constexpr int CONSUMER_REGISTERS = 232;
constexpr int DIAGONALS = 0;
constexpr int DIM_QK = 64;
constexpr int DIM_V = 64;
constexpr int DK_REGISTERS = 32;
constexpr int DQ_BLOCK_KV = 64;
constexpr int DQ_BLOCK_Q = 128;
constexpr int DQ_BY_ROWS = 1;
constexpr int DQ_COLUMNS = 64;
constexpr int DQ_REGISTERS = 32;
constexpr int DQ_SCORE_REGISTERS = 32;
constexpr int DQ_SMEM_BYTES = 58368;
constexpr int DQ_STAGED = 0;
constexpr int DQ_SUMMED = 0;
constexpr int DV_REGISTERS = 32;
constexpr int KV_STAGES = 1;
constexpr int LATE = 0;
constexpr int LISTED = 0;
constexpr int ORDERED = 0;
constexpr int OVERLAP = 1;
constexpr int PERSISTENT = 0;
constexpr int PRODUCER_REGISTERS = 40;
constexpr int SCORE_REGISTERS = 64;
constexpr int SECTION_BYTES = 0;
constexpr int SMEM_BYTES = 101376;
constexpr int STAGES = 2;
constexpr int WIDE = 0;

#include "fg/math.cuh"
#include "fg/sm90/backward.cuh"
#include "fg/sm90/layout.cuh"
#include "fg/sm90/ptx.cuh"
#include "fg/sm90/packed.cuh"
#include "fg/sm90/dropout.cuh"
#include "fg/sm90/rows.cuh"
#include "fg/sm90/schedule.cuh"

// d (64 x 128) = a b, or += with `accumulate`: both operands in shared memory, their rows along the depth of the product.
__device__ __forceinline__ void multiply_scores(float (&d)[64], fg::Descriptor a, fg::Descriptor b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1, 0, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b), "r"(accumulate));
}

// d (64 x 64) = a b, or += with `accumulate`: both operands in shared memory, their rows along the depth of the product.
__device__ __forceinline__ void multiply_rows(float (&d)[32], fg::Descriptor a, fg::Descriptor b, int accumulate) {
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

// d (64 x 64) += a b: a in registers, b in shared memory, the depth of the product down its rows.
__device__ __forceinline__ void add_dq(float (&d)[32], unsigned a0, unsigned a1, unsigned a2, unsigned a3, fg::Descriptor b) {
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
  fg::TensorMap map_dq;
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
  real* delta;
  const int* cu_seqlens_q;
  const int* cu_seqlens_k;
  const long long* seed;
  float* statistics;
  fg::Slot* row_slots;
  fg::Slot* key_slots;
  fg::Slot* dq_slots;
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
  int batch;
  int heads;
  int kv_heads;
  int q_len;
  int kv_len;
  int total_q;
  int total_k;
  unsigned drop_most;
  float scale;
  float keep_scale;
  int row_room;
  int key_room;
  int dq_room;
};

struct Lens { int q_len, kv_len; };
struct Item { long long q_start, k_start; Lens lens; };  // rows of a batch item within its tensors, and its lengths

FG_FN Item item(const Params& p, int b) {
  const fg::Range rows = fg::sequence(p.cu_seqlens_q, b, p.total_q), keys = fg::sequence(p.cu_seqlens_k, b, p.total_k);
  return Item{rows.begin, keys.begin, Lens{rows.end - rows.begin, keys.end - keys.begin}};
}

FG_FN fg::Dropout dropout(const Params& p, int b, int h) {
  return fg::Dropout{(unsigned)*p.seed, (unsigned)(*p.seed >> 32), (unsigned)(b * p.heads + h), p.drop_most};
}

// The variant: what depends on the head alone, on the row, on the key, and the rest per score.
struct Uniform {
  Lens lens;
  int b, h;
};

struct Row {
};

struct Col {
};

FG_FN Uniform uniform(const Params& p, Lens lens, int b, int h) {
  Uniform u;
  u.lens = lens;
  u.b = b;
  u.h = h;
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

// Which of the tiles of all rows and heads one is; a sequence's first one leaves room for one that each sequence before it fills partly.
FG_FN int first_tile_of(int q_start, int b) { return q_start / BLOCK_Q + b; }
FG_FN long long row_tile(const Params& p, int first_tile, int h, int tile) { return (long long)(first_tile + tile) * p.heads + h; }
// Where a sequence lies, as the lists of tiles hold it.
FG_FN fg::Packed packed_at(const Item& x) {
  const fg::Rows rows{(int)x.q_start, x.lens.q_len}, keys{(int)x.k_start, x.lens.kv_len};
  return fg::Packed{rows, keys};
}

// Blocks 0, 1 and 2 list the tiles of rows, of keys and of the rows of backward_dq, the costly ones first; the others clear what belongs to no sequence.
extern "C" __global__ void __launch_bounds__(1024, 1) backward_list(const __grid_constant__ Params p) {
  auto at = [&](int b) { return packed_at(item(p, b)); };
  if (blockIdx.x == 0) fg::list_tiles<BLOCK_Q, false>(p.row_slots, p.row_room, p.batch, at);
  if (blockIdx.x == 1) fg::list_tiles<BLOCK_KV, true>(p.key_slots, p.key_room, p.batch, at);
  if (blockIdx.x == 2) fg::list_tiles<DQ_BLOCK_Q, false>(p.dq_slots, p.dq_room, p.batch, at);
  if (blockIdx.x < 3) return;
  const int block = blockIdx.x - 3, blocks = gridDim.x - 3;
  const int q_end = fg::clamp_index(p.cu_seqlens_q[p.batch], p.total_q + 1), k_end = fg::clamp_index(p.cu_seqlens_k[p.batch], p.total_k + 1);
  fg::clear_statistics(p.delta, p.lse_stride_h, 0.0f, q_end, p.total_q, p.heads, block, blocks);
  fg::clear_rows<HEAD_DIM_QK>(p.dq, p.dq_stride_l, p.dq_stride_h, q_end, p.total_q, p.heads, block, blocks);
  fg::clear_rows<HEAD_DIM_QK>(p.dk, p.dk_stride_l, p.dk_stride_h, k_end, p.total_k, p.kv_heads, block, blocks);
  fg::clear_rows<HEAD_DIM_V>(p.dv, p.dv_stride_l, p.dv_stride_h, k_end, p.total_k, p.kv_heads, block, blocks);
}

// Statistics of the nth q tile, by the first PREPARE_THREADS of COUNT threads.
constexpr int PREPARE_THREADS = 256;
template <int COUNT> FG_FN void prepare(const Params& p, unsigned nth) {
  if (COUNT > PREPARE_THREADS && threadIdx.x >= PREPARE_THREADS) return;
  constexpr int CHUNKS = HEAD_DIM_V / 8, LANES = CHUNKS > 16 ? 32 : CHUNKS > 8 ? 16 : CHUNKS > 4 ? 8 : 4;  // lanes of a row; with 4, PREPARE_THREADS have 64

  const fg::Slot slot = p.row_slots[nth / p.heads];
  if (slot.sequence < 0) return;
  const int tile = nth / p.heads - slot.first, b = slot.sequence, h = nth % p.heads;
  const int q_start = slot.at.rows.first, q_len = slot.at.rows.count, first_tile = first_tile_of(q_start, b);
  const T* const out = FG_ROWS(out, b, h, q_start);
  const T* const dout = FG_ROWS(dout, b, h, q_start);
  float* const statistics = p.statistics + row_tile(p, first_tile, h, tile) * (2 * BLOCK_Q);
#pragma unroll
  for (int n = 0; n < BLOCK_Q * LANES / PREPARE_THREADS; ++n) {
    const int i = n * (PREPARE_THREADS / LANES) + threadIdx.x / LANES, q = tile * BLOCK_Q + i;
    float sum = 0.0f;
    if (q < q_len) {
#pragma unroll
      for (int chunk = threadIdx.x % LANES; chunk < CHUNKS; chunk += LANES) {
        const uint4 gradient = *reinterpret_cast<const uint4*>(dout + q * p.dout_stride_l + chunk * 8);
        sum += fg::dot_chunk<T>(*reinterpret_cast<const uint4*>(out + q * p.out_stride_l + chunk * 8), gradient);
      }
    }
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) sum += __shfl_xor_sync(fg::ALL_LANES, sum, step);
    if (threadIdx.x % LANES == 0) {
      float lse = fg::infinity<float>();
      if (q < q_len) {
        const long long index = b * p.lse_stride_b + h * p.lse_stride_h + q_start + q;
        p.delta[index] = sum;
        lse = log2_sum(p.lse[index]);
      }
      statistics[i] = lse;
      statistics[BLOCK_Q + i] = sum;
    }
  }
}

extern "C" __global__ void __launch_bounds__(PREPARE_THREADS) backward_prepare(const __grid_constant__ Params p) { prepare<PREPARE_THREADS>(p, blockIdx.x); }
// A q tile of the walk over those of all query heads of a group, in one word: is something in it hidden, is it the last one, query head and tile. Negative: there is none.
constexpr int PARTIAL_TILE = 1, LAST_TILE = 2;
__device__ __forceinline__ int describe(int head, int tile) { return (tile * GROUP + head) * 4; }
__device__ __forceinline__ int head_of(int described) { return described / 4 % GROUP; }
__device__ __forceinline__ int tile_of(int described) { return described / 4 / GROUP; }

// backward_main: a block owns BLOCK_KV keys of one kv head and walks over the q tiles of all query heads of its group; dK and dV stay in registers.
// Warpgroup 0 is the producer: its first warp chooses the tiles and loads them by TMA. Warpgroups 1 and 2 are the consumers: 64 keys each.
// Glossary:
//   b, h, kv_head      batch item, query head, kv head
//   s[4 j + 2 r + e]   score of key r * 8 + g of the warp's 16 and query 8 j + 2 c + e, with g = lane / 4, c = lane % 4: wgmma's accumulator of S^T; then the
//                      probability. dp, likewise: dP^T, then d score. Both are, packed in pairs, the left operands of dV and dK
//   statistics         of a tile's queries: lse in log2 units (+inf for a row without keys: its probabilities are 0), and delta
// Barriers (full: the TMA's bytes and the producer's arrival; empty: lane 0 of each consumer warp):
//   k_full, v_full     the block's own keys and values, once
//   q_full, q_empty    a tile of queries, its statistics, and its description in `tiles`
//   dout_full, ..empty a tile of dO
// Whoever fills waits for "empty" with the parity of the round before (a fresh barrier lets it pass), whoever reads waits for "full" with that of this round.

constexpr int THREADS = 384;
constexpr int SCORES = SCORE_REGISTERS, PAIRS = SCORES / 2;  // registers of a thread
constexpr int BOTH_BARRIER = 1;                              // named barriers: of the consumers
constexpr int OWN_BARRIER = 2;                               // of a consumer warpgroup each (2, 3)
struct alignas(1024) Smem {
  T k[BLOCK_KV * DIM_QK];  // at the end dK
  T v[BLOCK_KV * DIM_V];   // at the end dV
  T q[STAGES][BLOCK_Q * DIM_QK];
  T dout[STAGES][BLOCK_Q * DIM_V];
  float statistics[STAGES][2][BLOCK_Q];
  fg::Barrier k_full, v_full, q_full[STAGES], q_empty[STAGES], dout_full[STAGES], dout_empty[STAGES];
  int tiles[STAGES];  // see describe
};
static_assert(sizeof(Smem) == SMEM_BYTES, "tiler and kernel disagree");

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_main(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int group = __shfl_sync(fg::ALL_LANES, threadIdx.x / 128, 0) - 1, warp = __shfl_sync(fg::ALL_LANES, threadIdx.x / 32 % 4, 0), lane = threadIdx.x % 32;

  const fg::Slot slot = p.key_slots[blockIdx.x / p.kv_heads];
  const int b = slot.sequence;
  if (b < 0) return;
  const fg::Rows rows = slot.at.rows, keys = slot.at.keys;
  const Lens lens{rows.count, keys.count};
  const int first_tile = first_tile_of(rows.first, b), kv_tiles = (lens.kv_len + BLOCK_KV - 1) / BLOCK_KV;
  const int section = fg::heads_together(SECTION_BYTES, (long long)GROUP * lens.q_len * (2 * (DIM_QK + DIM_V) + 4 * DIM_QK * DQ_SUMMED), p.kv_heads);
  const fg::Work work = fg::nth_longest(blockIdx.x - slot.first * p.kv_heads, kv_tiles, p.kv_heads, section);
  const int kv_head = work.head, k_first = (kv_tiles - 1 - work.tile) * BLOCK_KV;
  if (threadIdx.x == 0) {
    fg::barrier_init(smem.k_full, 1);
    fg::barrier_init(smem.v_full, 1);
    for (int i = 0; i < STAGES; ++i) {
      fg::barrier_init(smem.q_full[i], 1);
      fg::barrier_init(smem.q_empty[i], 8);
      fg::barrier_init(smem.dout_full[i], 1);
      fg::barrier_init(smem.dout_empty[i], 8);
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
        fg::load_tile<DIM_QK, COLUMNS_QK, BLOCK_KV>(smem.k, p.map_k, smem.k_full, k_first, entry(kv_head, p.k_stride_h), keys, fg::READ_ONCE);
        fg::barrier_expect(smem.v_full, sizeof(smem.v));
        fg::load_tile<DIM_V, COLUMNS_V, BLOCK_KV>(smem.v, p.map_v, smem.v_full, k_first, entry(kv_head, p.v_stride_h), keys, fg::READ_ONCE);
      }
      fg::Ring<STAGES> ring;
      auto visit = [&](int described) {
        const int h = kv_head * GROUP + head_of(described), tile = tile_of(described), q_first = tile * BLOCK_Q;
        fg::barrier_wait(smem.q_empty[ring.slot], ring.parity ^ 1);
        if (lane == 0) {
          smem.tiles[ring.slot] = described;
          fg::barrier_expect(smem.q_full[ring.slot], sizeof(smem.q[0]) + sizeof(smem.statistics[0]));
          fg::load_tile<DIM_QK, COLUMNS_QK, BLOCK_Q>(smem.q[ring.slot], p.map_q, smem.q_full[ring.slot], q_first, entry(h, p.q_stride_h), rows, fg::READ_AGAIN);
          fg::bulk_load(smem.statistics[ring.slot], p.statistics + row_tile(p, first_tile, h, tile) * (2 * BLOCK_Q), sizeof(smem.statistics[0]), smem.q_full[ring.slot]);
        }
        fg::barrier_wait(smem.dout_empty[ring.slot], ring.parity ^ 1);
        if (lane == 0) {
          fg::barrier_expect(smem.dout_full[ring.slot], sizeof(smem.dout[0]));
          fg::load_tile<DIM_V, COLUMNS_V, BLOCK_Q>(smem.dout[ring.slot], p.map_dout, smem.dout_full[ring.slot], q_first, entry(h, p.dout_stride_h), rows, fg::READ_AGAIN);
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
    }
    return;
  }
  // ------------------------------------------------------------------------------------------------------------------------------ consumers
  fg::registers_raise<CONSUMER_REGISTERS>();
  const float multiplier = p.scale * (float)fg::LOG2E;
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
  fg::barrier_wait(smem.k_full, 0);
  fg::barrier_wait(smem.v_full, 0);
  fg::barrier_wait(smem.q_full[0], 0);
  bool more = fg::uniform(fg::shared_int(smem.tiles[0]) >= 0);
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

    fg::KeptTransposed<SCORES> kept;
    fg::draw(kept, fg::uniform(dropout(p, b, kv_head * GROUP + head_of(described))), own_k, own_q);

    auto exponentiate = [&]() {
#pragma unroll
      for (int i = 0; i < SCORES; i += 4) {
        const float2 lse_i = lse[i];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float& x = s[i + 2 * r + e];
            const float value = x;
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
        for (int j = 0; j < 4; ++j) {
          const bool stays = kept.at(i + j);
          dp[i + j] = s[i + j] * ((stays ? dp[i + j] * p.keep_scale : 0.0f) - (j % 2 ? delta_i.y : delta_i.x));
          if (!stays) s[i + j] = 0.0f;
        }
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
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            bool visible = own_k + r * 8 < lens.kv_len;
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
    fg::keep(dv);
    fg::wgmma_fence();
#pragma unroll
    for (int i = 0; i < BLOCK_Q / 16; ++i)
      add_dv(dv, weights[4 * i], weights[4 * i + 1], weights[4 * i + 2], weights[4 * i + 3], fg::descriptor<COLUMNS_V>(dout_down + ring.slot * DOUT_SLOT) + fg::step_down<COLUMNS_V>(i));
    fg::wgmma_commit();
    fg::keep(dk);
    fg::wgmma_fence();
#pragma unroll
    for (int i = 0; i < BLOCK_Q / 16; ++i)
      add_dk(dk, gradients[4 * i], gradients[4 * i + 1], gradients[4 * i + 2], gradients[4 * i + 3], fg::descriptor<COLUMNS_QK>(q_down + ring.slot * Q_SLOT) + fg::step_down<COLUMNS_QK>(i));
    fg::wgmma_commit();
    fg::wgmma_wait<1>();
    fg::keep(dv);
    release(smem.dout_empty[ring.slot]);
    more = fg::uniform(!(fg::shared_int(smem.tiles[ring.slot]) & LAST_TILE));
    fg::wgmma_wait<0>();
    fg::keep(dk);
    release(smem.q_empty[ring.slot]);
    ring.advance();
  }
  // Through shared memory, over rows that only this warpgroup reads; TMA leaves out what lies past the tensor. Keys past kv_len have zero gradients.
#pragma unroll
  for (int i = 0; i < DV_REGISTERS; ++i) dv[i] *= p.keep_scale;
  const unsigned staged_dv = fg::shared_address(smem.v);
#pragma unroll
  for (int i = 0; i < DV_REGISTERS; i += 8)
    fg::store_matrices(staged_dv + fg::chunk_offset<COLUMNS_V, BLOCK_KV>(group * 64 + warp * 16 + lane % 16, i / 4 + lane / 16), fg::pack<T>(dv[i], dv[i + 1]), fg::pack<T>(dv[i + 2], dv[i + 3]),
                       fg::pack<T>(dv[i + 4], dv[i + 5]), fg::pack<T>(dv[i + 6], dv[i + 7]));
  fg::async_proxy_fence();
  fg::group_sync(OWN_BARRIER + group, 128);
  if (threadIdx.x % 128 == 0) {
#pragma unroll
    for (int d = 0; d < DIM_V; d += COLUMNS_V) fg::tma_store(p.map_dv, smem.v + d * BLOCK_KV + group * 64 * COLUMNS_V, d, k_first + group * 64, kv_head, keys);
    fg::tma_store_commit();
  }
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
    for (int d = 0; d < DIM_QK; d += COLUMNS_QK) fg::tma_store(p.map_dk, smem.k + d * BLOCK_KV + group * 64 * COLUMNS_QK, d, k_first + group * 64, kv_head, keys);
    fg::tma_store_commit();
  }
  if (threadIdx.x % 128 == 0) fg::tma_store_wait_read();  // shared memory must outlive the copies
}

// backward_dq: a block owns DQ_BLOCK_Q rows of one head, a consumer warpgroup 64 of them, and walks over the keys that they see. dS goes straight from the
// accumulators into the next product. A step starts the scores and dP of one tile, then dQ += dS K of the tile before it,
// which is in flight while it makes its own dS.
//   s[4 j + 2 r + e]   score of row r * 8 + g and key 8 j + 2 c + e; dp likewise
//   q_full, dout_full  the block's own rows, once
//   k_full, k_empty    a tile of keys, and in `tiles` what it is: tile * 2 + (something in it may be hidden); < 0: no more
//   v_full, v_empty    a tile of values
constexpr int DQ_SCORES = DQ_SCORE_REGISTERS, DQ_SUMS = DK_REGISTERS;  // registers of a thread
constexpr int DQ_STAGES = 2;
constexpr int DQ_BOTH_BARRIER = 1, DQ_OWN_BARRIER = 2;  // named barriers: of the consumers, and of each consumer warpgroup (2, 3)

struct alignas(1024) DqSmem {
  T q[DQ_BLOCK_Q * DIM_QK];  // at the end dQ
  T dout[DQ_BLOCK_Q * DIM_V];
  T k[DQ_STAGES][DQ_BLOCK_KV * DIM_QK];
  T v[DQ_BLOCK_KV * DIM_V];
  fg::Barrier q_full, dout_full, k_full[DQ_STAGES], k_empty[DQ_STAGES], v_full, v_empty;
  int tiles[DQ_STAGES];
};
static_assert(sizeof(DqSmem) == DQ_SMEM_BYTES, "tiler and kernel disagree");

extern "C" __global__ void __launch_bounds__(384, 1) backward_dq(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char smem_bytes[];
  DqSmem& smem = *reinterpret_cast<DqSmem*>(smem_bytes);
  const int group = __shfl_sync(fg::ALL_LANES, threadIdx.x / 128, 0) - 1, warp = __shfl_sync(fg::ALL_LANES, threadIdx.x / 32 % 4, 0), lane = threadIdx.x % 32;
  const fg::Slot slot = p.dq_slots[blockIdx.x / p.heads];
  const int b = slot.sequence;
  if (b < 0) return;
  const fg::Rows rows = slot.at.rows, keys = slot.at.keys;
  const Lens lens{rows.count, keys.count};
  const int first_tile = first_tile_of(rows.first, b), q_tiles = (lens.q_len + BLOCK_Q - 1) / BLOCK_Q;
  const int section = fg::heads_together(SECTION_BYTES, 2ll * lens.kv_len * (DIM_QK + DIM_V) / GROUP, p.heads);
  const fg::Work work = fg::nth_longest(blockIdx.x - slot.first * p.heads, (lens.q_len + DQ_BLOCK_Q - 1) / DQ_BLOCK_Q, p.heads, section);
  const int h = work.head, q_first = work.tile * DQ_BLOCK_Q;
  if (threadIdx.x == 0) {
    fg::barrier_init(smem.q_full, 1);
    fg::barrier_init(smem.dout_full, 1);
    for (int i = 0; i < DQ_STAGES; ++i) {
      fg::barrier_init(smem.k_full[i], 1);
      fg::barrier_init(smem.k_empty[i], 8);
    }
    fg::barrier_init(smem.v_full, 1);
    fg::barrier_init(smem.v_empty, 8);
    fg::barrier_init_fence();
  }
  __syncthreads();

  if (group < 0) {  // ---------------------------------------------------------------------------------------------------------------- producer
    fg::registers_lower<PRODUCER_REGISTERS>();
    if (warp > 0) return;
    auto entry = [](int index, long long stride) { return stride != 0 ? index : 0; };  // of a tensor map, which has no strides of 0
    const int q_last = min(q_first + DQ_BLOCK_Q, lens.q_len) - 1;
    fg::Ring<DQ_STAGES> ring;
    fg::Ring<1> v_ring;
    const Uniform u = uniform(p, lens, b, h);
    const fg::Range seen = kv_range(p, u, q_first, q_last);
    const int first = seen.begin / DQ_BLOCK_KV;
    bool loaded = false;  // the block's own rows are on their way

#pragma unroll 1
    for (int tile = seen.begin < seen.end ? (seen.end - 1) / DQ_BLOCK_KV : -1; tile >= first; --tile) {
      const int k_first = tile * DQ_BLOCK_KV;
      bool partial = k_first + DQ_BLOCK_KV > lens.kv_len;
      if (lane == 0 && !loaded) {
        fg::barrier_expect(smem.q_full, sizeof(smem.q));
        fg::load_tile<DIM_QK, COLUMNS_QK, DQ_BLOCK_Q>(smem.q, p.map_q, smem.q_full, q_first, entry(h, p.q_stride_h), rows, fg::READ_ONCE);
      }
      fg::barrier_wait(smem.k_empty[ring.slot], ring.parity ^ 1);
      if (lane == 0) {
        smem.tiles[ring.slot] = tile * 2 + partial;
        fg::barrier_expect(smem.k_full[ring.slot], sizeof(smem.k[0]));
        fg::load_tile<DIM_QK, COLUMNS_QK, DQ_BLOCK_KV>(smem.k[ring.slot], p.map_k, smem.k_full[ring.slot], k_first, entry(h / GROUP, p.k_stride_h), keys, fg::READ_AGAIN);
        if (!loaded) {
          fg::barrier_expect(smem.dout_full, sizeof(smem.dout));
          fg::load_tile<DIM_V, COLUMNS_V, DQ_BLOCK_Q>(smem.dout, p.map_dout, smem.dout_full, q_first, entry(h, p.dout_stride_h), rows, fg::READ_ONCE);
        }
      }
      loaded = true;
      fg::barrier_wait(smem.v_empty, v_ring.parity ^ 1);
      if (lane == 0) {
        fg::barrier_expect(smem.v_full, sizeof(smem.v));
        fg::load_tile<DIM_V, COLUMNS_V, DQ_BLOCK_KV>(smem.v, p.map_v, smem.v_full, k_first, entry(h / GROUP, p.v_stride_h), keys, fg::READ_AGAIN);
      }
      ring.advance();
      v_ring.advance();
    }
    fg::barrier_wait(smem.k_empty[ring.slot], ring.parity ^ 1);
    if (lane == 0) {
      smem.tiles[ring.slot] = -1;
      fg::barrier_arrive(smem.k_full[ring.slot]);
    }
    return;
  }

  // ------------------------------------------------------------------------------------------------------------------------------ consumers
  fg::registers_raise<CONSUMER_REGISTERS>();
  const float multiplier = p.scale * (float)fg::LOG2E;
  int own_q = q_first + group * 64 + warp * 16 + lane / 4;  // the thread's rows: this one and 8 further
  float lse[2], delta[2], dq[DQ_SUMS];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int q = own_q + r * 8, tile = q / BLOCK_Q;
    const float* const statistics = p.statistics + row_tile(p, first_tile, h, tile) * (2 * BLOCK_Q) + q % BLOCK_Q;
    lse[r] = tile < q_tiles ? statistics[0] : fg::infinity<float>();
    delta[r] = tile < q_tiles ? statistics[BLOCK_Q] : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < DQ_SUMS; ++i) dq[i] = 0.0f;
  const fg::Dropout drops = fg::uniform(dropout(p, b, h));
  unsigned gradients[DQ_SCORES / 2];
  fg::Ring<DQ_STAGES> ring, before;  // of the tile whose scores are computed, and of the one whose dS is at hand
  fg::Ring<1> v_ring;
  unsigned q_low = fg::descriptor_low(fg::shared_address(smem.q) + group * 64 * COLUMNS_QK * 2, 16), k_low = fg::descriptor_low(fg::shared_address(smem.k), 16);
  unsigned dout_low = fg::descriptor_low(fg::shared_address(smem.dout) + group * 64 * COLUMNS_V * 2, 16), v_low = fg::descriptor_low(fg::shared_address(smem.v), 16);
  unsigned k_down = fg::descriptor_low(fg::shared_address(smem.k), DQ_BLOCK_KV * COLUMNS_QK * 2);
  constexpr unsigned K_SLOT = sizeof(smem.k[0]) / 16;
  auto release = [&](fg::Barrier& empty) {
    if (lane == 0) fg::barrier_arrive(empty);
  };
  auto next_tile = [&]() {
    fg::barrier_wait(smem.k_full[ring.slot], ring.parity);
    return fg::shared_int(smem.tiles[ring.slot]);
  };
  auto start_dq = [&]() {
    fg::keep(dq);
    fg::wgmma_fence();
#pragma unroll
    for (int i = 0; i < DQ_BLOCK_KV / 16; ++i)
      add_dq(dq, gradients[4 * i], gradients[4 * i + 1], gradients[4 * i + 2], gradients[4 * i + 3], fg::descriptor<COLUMNS_QK>(k_down + before.slot * K_SLOT) + fg::step_down<COLUMNS_QK>(i));
    fg::wgmma_commit();
  };
  auto step = [&](int described, bool first) {
    const int k_first = (described >> 1) * DQ_BLOCK_KV, own_k = k_first + lane % 4 * 2;
    fg::opaque(q_low);  // or the compiler keeps, and spills, the sums of every step of the products
    fg::opaque(dout_low);
    fg::opaque(v_low);
    fg::opaque(own_q);
    float s[DQ_SCORES], dp[DQ_SCORES];
    fg::keep(s);
    fg::wgmma_fence();
#pragma unroll
    for (int i = 0; i < DIM_QK / 16; ++i)
      multiply_rows(s, fg::descriptor<COLUMNS_QK>(q_low) + fg::step_across<COLUMNS_QK, DQ_BLOCK_Q>(i), fg::descriptor<COLUMNS_QK>(k_low + ring.slot * K_SLOT) + fg::step_across<COLUMNS_QK, DQ_BLOCK_KV>(i), i != 0);
    fg::wgmma_commit();
    fg::barrier_wait(smem.v_full, v_ring.parity);
    fg::keep(dp);
    fg::wgmma_fence();
#pragma unroll
    for (int i = 0; i < DIM_V / 16; ++i)
      multiply_rows(dp, fg::descriptor<COLUMNS_V>(dout_low) + fg::step_across<COLUMNS_V, DQ_BLOCK_Q>(i), fg::descriptor<COLUMNS_V>(v_low) + fg::step_across<COLUMNS_V, DQ_BLOCK_KV>(i), i != 0);
    fg::wgmma_commit();

    if (!first) start_dq();
    fg::KeptFragments<1, DQ_SCORES / 4> kept;
    fg::draw(kept, drops, own_q, k_first);
    auto differentiate = [&]() {  // score and lse to probability, then to d score
#pragma unroll
      for (int i = 0; i < DQ_SCORES; i += 4)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float x = s[i + 2 * r + e];
            float& d = dp[i + 2 * r + e];
            const float value = x;
            d = kept.at(r, i / 4, e) ? d * p.keep_scale : 0.0f;
            d = fg::approximate_exp2(value * multiplier - lse[r]) * (d - delta[r]);
          }
        }
    };
    auto hide = [&]() {
#pragma unroll
      for (int i = 0; i < DQ_SCORES; i += 4)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int k = own_k + i * 2 + e;
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            bool visible = k < lens.kv_len;
            if (!visible) dp[i + 2 * r + e] = 0.0f;
          }
        }
    };
    if (first) fg::wgmma_wait<0>();
    else fg::wgmma_wait<1>();
    fg::keep(s);
    fg::keep(dp);
    release(smem.v_empty);
    differentiate();
    if (fg::uniform(described & 1)) hide();
    if (!first) {
      fg::wgmma_wait<0>();
      fg::keep(dq);
      release(smem.k_empty[before.slot]);
    }
#pragma unroll
    for (int i = 0; i < DQ_SCORES / 2; ++i) gradients[i] = fg::pack<T>(dp[2 * i], dp[2 * i + 1]);
    before = ring;
    ring.advance();
    v_ring.advance();
  };

  int described = next_tile();
  if (fg::uniform(described >= 0)) {
    fg::barrier_wait(smem.q_full, 0);
    fg::barrier_wait(smem.dout_full, 0);
    step(described, true);
#pragma unroll 1
    while (fg::uniform((described = next_tile()) >= 0)) step(described, false);
    start_dq();
    fg::wgmma_wait<0>();
    fg::keep(dq);
  }
#pragma unroll
  for (int i = 0; i < DQ_SUMS; ++i) {
    dq[i] *= p.scale;
  }
  // Through shared memory, over the warpgroup's own queries; TMA leaves out what lies past the tensor.
  const unsigned staged = fg::shared_address(smem.q);
#pragma unroll
  for (int i = 0; i < DQ_SUMS; i += 8)
    fg::store_matrices(staged + fg::chunk_offset<COLUMNS_QK, DQ_BLOCK_Q>(group * 64 + warp * 16 + lane % 16, i / 4 + lane / 16), fg::pack<T>(dq[i], dq[i + 1]), fg::pack<T>(dq[i + 2], dq[i + 3]),
                       fg::pack<T>(dq[i + 4], dq[i + 5]), fg::pack<T>(dq[i + 6], dq[i + 7]));
  fg::async_proxy_fence();
  fg::group_sync(DQ_OWN_BARRIER + group, 128);
  if (threadIdx.x % 128 == 0) {
#pragma unroll
    for (int d = 0; d < DIM_QK; d += COLUMNS_QK) fg::tma_store(p.map_dq, smem.q + d * DQ_BLOCK_Q + group * 64 * COLUMNS_QK, d, q_first + group * 64, h, rows);
    fg::tma_store_commit();
    fg::tma_store_wait_read();  // shared memory must outlive the copies
  }
}
