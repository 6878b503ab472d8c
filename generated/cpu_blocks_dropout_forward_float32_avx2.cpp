// Attention forward written by flashgen: cpu, float32, head dims 64/64, family cpu, dropout.
// Keys of a row: k <= q + kv_len - q_len and k in a block of capture_0[q // 128, k // 128].
// Tiles are empty, full or partial by interval evaluation with the bounds of captured tensors over the tile.
// What is not visible is skipped by closed-form bounds, the explicit blocks of capture_0.

// Flash attention forward on a CPU: one task per (batch item, head, tile of BLOCK_Q query rows), keys in tiles of BLOCK_KV.
//
// Everything is transposed: vector lanes run along the query rows, so that maxima and sums over keys are plain vector operations.
//   S^T[key][lane] = K Q^T     O^T[d][lane] += V^T P^T
// b, h: batch item, query head (kv head h / GROUP). q_first, k_first: first row and key of a tile; lane: row - q_first; n: key - k_first.
// count: keys of a tile that exist. Q is transposed and scaled once per task; K and V are read where they lie, one element broadcast at a time.
// Rows past q_len are lanes of zeros whose results are dropped. Nothing past a length is read.
#include "fg/base.h"

using real = float;        // scores, statistics, captured floats
using T = float;  // q, k, v, out

constexpr int HEAD_DIM_QK = 64;
constexpr int HEAD_DIM_V = 64;
constexpr int GROUP = 1;  // query heads per kv head
constexpr int AMX = 0;
constexpr int BLOCK_KV = 128;
constexpr int BLOCK_Q = 32;

#include "fg/interval.h"
#include "fg/math.h"
#include "fg/cpu/vector.h"
#include "fg/cpu/product.h"
#include "fg/cpu/softmax.h"
#include "fg/cpu/tile.h"
#include "fg/cpu/parallel.h"
#include "fg/cpu/dropout.h"

struct Params {
  const T* q;
  const T* k;
  const T* v;
  T* out;
  real* lse;
  const long long* seed;
  const unsigned char* capture_0;
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
  unsigned drop_most;
  float scale;
  float keep_scale;
};

struct Lens { int q_len, kv_len; };
struct Item { long long q_start, k_start; Lens lens; };  // rows of a batch item within its tensors, and its lengths

FG_FN Item item(const Params& p, int b) {
  return Item{0, 0, Lens{p.q_len, p.kv_len}};
}

FG_FN fg::Dropout dropout(const Params& p, int b, int h) {
  return fg::Dropout{(unsigned)*p.seed, (unsigned)(*p.seed >> 32), (unsigned)(b * p.heads + h), p.drop_most};
}

// The variant: what depends on the head alone, on the row, on the key, and the rest per score.
struct Uniform {
  Lens lens;
  int b, h;
  int u0;
};

struct Row {
  int r0;
  int r1;
};

struct Col {
  int c0;
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
  r.r1 = q >> 7;
  return r;
}

FG_FN Col col(const Params& p, const Uniform& u, int k) {
  Col c{};
  c.c0 = k >> 7;
  return c;
}

FG_FN bool mask(const Params& p, const Uniform& u, const Row& r, const Col& c, int q, int k) {
  const bool t0 = (p.capture_0[fg::clamp_index(r.r1, p.capture_0_size_0) * p.capture_0_stride_0 + fg::clamp_index(c.c0, p.capture_0_size_1) * p.capture_0_stride_1] != 0);
  return (k <= r.r0) & t0;
}

// EMPTY, PARTIAL or FULL: the mask over a tile of rows and keys, both ends inclusive
FG_FN int tile_class(const Params& p, const Uniform& u, int q_first, int q_last, int k_first, int k_last) {
  const auto r0 = fg::span_sub(fg::Span{u.lens.kv_len, u.lens.kv_len}, fg::Span{u.lens.q_len, u.lens.q_len});
  const auto r1 = fg::span_add(fg::Span{q_first, q_last}, r0);
  const auto r2 = fg::truth_le(fg::Span{k_first, k_last}, r1);
  const auto r3 = fg::span_floordiv(fg::Span{q_first, q_last}, fg::Span{128, 128});
  const auto r4 = fg::span_floordiv(fg::Span{k_first, k_last}, fg::Span{128, 128});
  const auto r5 = fg::span_load(p.capture_0, fg::Axis{r3, p.capture_0_size_0, p.capture_0_stride_0}, fg::Axis{r4, p.capture_0_size_1, p.capture_0_stride_1});
  const auto r6 = fg::truth_of(r5);
  const auto r7 = fg::truth_and(r2, r6);
  return r7.must ? fg::FULL : r7.may ? fg::PARTIAL : fg::EMPTY;
}

// keys that rows q_first..q_last can see
FG_FN fg::Range kv_range(const Params& p, const Uniform& u, int q_first, int q_last) {
  const auto r0 = fg::span_add(fg::Span{u.lens.kv_len, u.lens.kv_len}, fg::Span{q_first, q_last});
  const auto r1 = fg::span_sub(r0, fg::Span{u.lens.q_len, u.lens.q_len});
  const auto r2 = fg::span_below(r1);
  const auto r3 = fg::span_unknown();
  const auto r4 = fg::span_meet(r2, r3);
  return fg::range_within(r4, u.lens.kv_len);
}

// rows that keys k_first..k_last can be seen by
FG_FN fg::Range q_range(const Params& p, const Uniform& u, int k_first, int k_last) {
  const auto r0 = fg::span_add(fg::Span{u.lens.q_len, u.lens.q_len}, fg::Span{k_first, k_last});
  const auto r1 = fg::span_sub(r0, fg::Span{u.lens.kv_len, u.lens.kv_len});
  const auto r2 = fg::span_above(r1);
  const auto r3 = fg::span_unknown();
  const auto r4 = fg::span_meet(r2, r3);
  return fg::range_within(r4, u.lens.q_len);
}

// the first key >= begin that rows q_first..q_last can see, fg::NOWHERE if there is none: over the holes in their range
FG_FN int kv_from(const Params& p, const Uniform& u, int q_first, int q_last, int begin) {
  const auto r0 = fg::span_floordiv(fg::Span{0, u.lens.kv_len - 1}, fg::Span{128, 128});
  const auto r1 = fg::span_floordiv(fg::Span{q_first, q_last}, fg::Span{128, 128});
  const auto r2 = fg::Axis{r1, p.capture_0_size_0, p.capture_0_stride_0};
  const auto r3 = fg::Axis{r0, p.capture_0_size_1, p.capture_0_stride_1};
  const auto r4 = fg::span_add(fg::Span{u.lens.kv_len, u.lens.kv_len}, fg::Span{q_first, q_last});
  const auto r5 = fg::span_sub(r4, fg::Span{u.lens.q_len, u.lens.q_len});
  const auto r6 = fg::span_below(r5);
  const auto r7 = fg::span_unknown();
  const auto r8 = fg::span_meet(r6, r7);
  const auto r9 = fg::range_within(r8, u.lens.kv_len);
  const auto r10 = fg::first_from(r9, begin);
  const auto r11 = fg::blocks_from(p.capture_0, r2, r3, 128, r10);
  return fg::first_from(r9, r11);
}

namespace {

using namespace fg;

constexpr int VECTORS = BLOCK_Q / WIDTH;  // vectors of lanes in a tile
static_assert(BLOCK_Q % WIDTH == 0, "a tile of query rows is whole vectors");
constexpr int ROW_QK = round_up(HEAD_DIM_QK, WIDTH);
constexpr bool CONVERT = !same_type<T, real>::value;

struct Scratch {
  alignas(64) real query_rows[BLOCK_Q * ROW_QK];
  alignas(64) real query[HEAD_DIM_QK * BLOCK_Q];                             // scale * Q^T
  alignas(64) real scores[round_up(BLOCK_KV, rows_for(VECTORS)) * BLOCK_Q];  // S^T, then P^T
  alignas(64) real out[HEAD_DIM_V * BLOCK_Q];                                // O^T, not yet divided by the sum of weights
  alignas(64) real key[CONVERT ? BLOCK_KV * HEAD_DIM_QK : 1];
  alignas(64) real value[CONVERT ? BLOCK_KV * HEAD_DIM_V : 1];
};

struct Task {
  const Params& params;
  const Uniform uniform;
  const Item at;
  int b, h, q_first, rows;  // rows: query rows of the tile that exist
};

// Selects: what lies under the mask becomes -inf, also if it was NaN.
FG_FN void apply_mask(const Task& task, const Row* rows, int k_first, int count, real* __restrict scores) {
  for (int n = 0; n < count; ++n) {
    const int k = k_first + n;
    const Col column = col(task.params, task.uniform, k);
    for (int lane = 0; lane < BLOCK_Q; ++lane) {
      const bool visible = mask(task.params, task.uniform, rows[lane], column, task.q_first + lane, k);
      scores[n * BLOCK_Q + lane] = visible ? scores[n * BLOCK_Q + lane] : -infinity<real>();
    }
  }
}

FG_FN bool visible(const Task& task, const Row* rows, int lane, int k) {
  return mask(task.params, task.uniform, rows[lane], col(task.params, task.uniform, k), task.q_first + lane, k);
}

// `count` rows of K or V from row `first` on, to be fetched early; rows that are converted are read in order and need no help.
template <int DIM> FG_FN Ahead ahead(const T* rows, long long stride, int first, int count) {
  if constexpr (CONVERT) return Ahead{};
  else return Ahead{rows + first * stride, stride, count, DIM};
}

// The softmax and O^T of one tile of rows. exact: partial tiles leave out masked products one by one.
FG_FN void attend(const Task& task, bool exact, Scratch& scratch, Softmax<VECTORS>& softmax) {
  const Params& p = task.params;
  const int q_last = task.q_first + task.rows - 1;
  Row rows[BLOCK_Q];
  for (int lane = 0; lane < BLOCK_Q; ++lane) rows[lane] = row(p, task.uniform, task.q_first + lane);

  softmax.reset();
  for (int i = 0; i < HEAD_DIM_V * VECTORS; ++i) store(scratch.out + i * WIDTH, vec{});
  const T* const keys = p.k + task.b * p.k_stride_b + task.h / GROUP * p.k_stride_h + task.at.k_start * p.k_stride_l;
  const T* const values = p.v + task.b * p.v_stride_b + task.h / GROUP * p.v_stride_h + task.at.k_start * p.v_stride_l;
  const Range seen = kv_range(p, task.uniform, task.q_first, q_last);
  for (int k_first = seen.begin; k_first < seen.end; k_first = kv_from(p, task.uniform, task.q_first, q_last, k_first + BLOCK_KV)) {
    const int count = int_min(BLOCK_KV, seen.end - k_first);
    const int kind = tile_class(p, task.uniform, task.q_first, q_last, k_first, k_first + count - 1);
    if (kind == EMPTY) continue;
    long long key_stride = p.k_stride_l, value_stride = p.v_stride_l;
    const real* const key = rows_as_real<HEAD_DIM_QK>(keys + k_first * key_stride, key_stride, count, scratch.key);
    multiply_rows<VECTORS>(key, key_stride, count, scratch.query, HEAD_DIM_QK, scratch.scores, ahead<HEAD_DIM_V>(values, p.v_stride_l, k_first, count));
    if (kind == PARTIAL) apply_mask(task, rows, k_first, count, scratch.scores);
    vec decay[VECTORS];
    softmax.update(scratch.scores, count, decay);
    drop_weights<BLOCK_Q>(dropout(p, task.b, task.h), k_first, count, task.q_first, scratch.scores);
    const real* const value = rows_as_real<HEAD_DIM_V>(values + k_first * value_stride, value_stride, count, scratch.value);
    if (exact && kind == PARTIAL) {
      accumulate_visible_columns<HEAD_DIM_V, VECTORS>(value, value_stride, count, scratch.scores, decay, scratch.out,
                                                      [&](int n, int lane) { return visible(task, rows, lane, k_first + n); });
      continue;
    }
    accumulate_columns<HEAD_DIM_V, VECTORS>(value, value_stride, count, scratch.scores, decay, scratch.out,
                                            ahead<HEAD_DIM_QK>(keys, p.k_stride_l, k_first + count, int_min(BLOCK_KV, seen.end - k_first - count)));
  }
}

// Divides by the sum of weights and stores the tile's rows of out, lse and the largest scores.
FG_FN void finish(const Task& task, const Scratch& scratch, const Softmax<VECTORS>& softmax) {
  const Params& p = task.params;
  const real* const total = (const real*)softmax.total;
  alignas(64) real factor[BLOCK_Q];
  const real* const reference = (const real*)softmax.reference;
  const long long statistics = task.b * p.lse_stride_b + task.h * p.lse_stride_h + task.at.q_start + task.q_first;
  for (int lane = 0; lane < task.rows; ++lane) {
    const bool empty = total[lane] == 0;
    factor[lane] = empty ? real(0) : 1 / total[lane];
    p.lse[statistics + lane] = empty ? -infinity<real>() : reference[lane] * real(LN2) + fg::log(total[lane]);
    factor[lane] *= p.keep_scale;
  }
  T* const out = p.out + task.b * p.out_stride_b + task.h * p.out_stride_h + (task.at.q_start + task.q_first) * p.out_stride_l;
  store_transposed<HEAD_DIM_V, BLOCK_Q>(scratch.out, factor, task.rows, out, p.out_stride_l);
}

void run(const Task& task, Scratch& scratch) {
  const Params& p = task.params;
  const T* const query = p.q + task.b * p.q_stride_b + task.h * p.q_stride_h + (task.at.q_start + task.q_first) * p.q_stride_l;
  load_rows<HEAD_DIM_QK, ROW_QK, BLOCK_Q>(query, p.q_stride_l, task.rows, p.scale, scratch.query_rows);
  transpose_rows<HEAD_DIM_QK, ROW_QK, BLOCK_Q>(scratch.query_rows, scratch.query);
  Softmax<VECTORS> softmax;
  // NaN or Inf in the result is rare and may come from a masked value: only then is the tile done again, exactly.
  for (int attempt = 0; attempt < 2; ++attempt) {
    attend(task, attempt == 1, scratch, softmax);
    if (all_finite(scratch.out, HEAD_DIM_V * BLOCK_Q)) break;
  }
  finish(task, scratch, softmax);
}

}  // namespace

// Returns 0. `threads` is the number of OpenMP threads to use.
extern "C" int fg_forward(const Params* p, int threads) {
  const int q_tiles = (p->q_len + BLOCK_Q - 1) / BLOCK_Q;
  const long long tiles = (long long)p->batch * p->heads * q_tiles;
  threads = useful_threads((double)p->batch * p->heads * p->q_len * p->kv_len * (HEAD_DIM_QK + HEAD_DIM_V), threads);
  const long long tasks = tiles;
  const int turn = tasks_per_turn(tasks, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    static thread_local Scratch storage;
    Scratch& scratch = in_register(storage);
    const FlushSubnormals flush;
#pragma omp for schedule(dynamic, turn)
    for (long long task = 0; task < tasks; ++task) {
      // Last tiles first: under a causal mask they are the longest.
      const long long i = task;
      const int b = (int)(i / ((long long)p->heads * q_tiles)), h = (int)(i / q_tiles % p->heads), q_first = (int)(q_tiles - 1 - i % q_tiles) * BLOCK_Q;
      const Item at = item(*p, b);
      if (q_first >= at.lens.q_len) continue;
      const int rows = int_min(BLOCK_Q, at.lens.q_len - q_first);
      run(Task{*p, uniform(*p, at.lens, b, h), at, b, h, q_first, rows}, scratch);
    }
  }
  return 0;
}
