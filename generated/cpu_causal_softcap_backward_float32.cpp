// Attention backward written by flashgen: cpu, float32, head dims 64/64, family cpu.
// Keys of a row: k <= q + kv_len - q_len.
// Tiles are empty, full or partial by interval evaluation.
// Score: a general function of s, 3 operations per pair, 0 of them loads.

// Flash attention backward on a CPU: one task per (batch item, kv head) walks the query tiles of all its query heads and, for each, the key tiles
// they see. With few heads the query tiles are dealt out to several tasks, whose dK and dV are added up in a fixed order.
//
// Transposed as in the forward, vector lanes along the query rows; one pass, five products per tile:
//   S^T[key][lane] = K Q^T     dP^T[key][lane] = V dO^T     dQ^T[d][lane] += K^T dS^T     dV[key][d] += P^T dO     dK[key][d] += dS^T Q
// P = exp(score - lse), dS = P * (dP - delta) * d score / d s, delta = rowsum(dO * O) - dlse.
// b, h: batch item, query head; kv_head = h / GROUP. q_first, k_first: first row and key of a tile; lane: row - q_first; n: key - k_first.
// count, rows: keys and query rows of a tile that exist. Nothing past a length is read. dK and dV are summed in `real`, dQ belongs to one tile.
#include "fg/base.h"

using real = float;        // scores, statistics, captured floats
using T = float;  // q, k, v, out

constexpr int HEAD_DIM_QK = 64;
constexpr int HEAD_DIM_V = 64;
constexpr int GROUP = 1;  // query heads per kv head
constexpr int AMX = 0;
constexpr int BLOCK_KV = 128;
constexpr int BLOCK_Q = 48;

#include "fg/interval.h"
#include "fg/math.h"
#include "fg/cpu/vector.h"
#include "fg/cpu/product.h"
#include "fg/cpu/softmax.h"
#include "fg/cpu/tile.h"
#include "fg/cpu/parallel.h"

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
  float scale;
  float float_0;
  float float_1;
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
};

struct Col {
};

FG_FN Uniform uniform(const Params& p, Lens lens, int b, int h) {
  Uniform u;
  u.lens = lens;
  u.b = b;
  u.h = h;
  u.u0 = fg::divide(1.0f, p.float_1);
  u.u1 = u.lens.kv_len - u.lens.q_len;
  return u;
}

FG_FN Row row(const Params& p, const Uniform& u, int q) {
  Row r{};
  r.r0 = q + u.u1;
  return r;
}

FG_FN Col col(const Params& p, const Uniform& u, int k) {
  Col c{};
  return c;
}

// s is scale * (q . k)
FG_FN real score(const Params& p, const Uniform& u, const Row& r, const Col& c, real s, int q, int k) {
  return p.float_0 * fg::tanh(s * u.u0);
}

// the score and d score / d s
FG_FN void score_grad(const Params& p, const Uniform& u, const Row& r, const Col& c, real s, int q, int k, real& value, real& slope) {
  const real t0 = fg::tanh(s * u.u0);
  value = p.float_0 * t0;
  slope = u.u0 * (1.0f - t0 * t0) * p.float_0;
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

namespace {

using namespace fg;

constexpr int VECTORS = BLOCK_Q / WIDTH;  // vectors of lanes in a tile
static_assert(BLOCK_Q % WIDTH == 0, "a tile of query rows is whole vectors");
constexpr int ROW_QK = round_up(HEAD_DIM_QK, WIDTH), ROW_V = round_up(HEAD_DIM_V, WIDTH);  // padded lengths of rows that are read as vectors
constexpr bool CONVERT = !same_type<T, real>::value;

struct Scratch {
  alignas(64) real query_rows[BLOCK_Q * ROW_QK];  // scale * Q
  alignas(64) real dout_rows[BLOCK_Q * ROW_V];
  alignas(64) real query[HEAD_DIM_QK * BLOCK_Q];  // the same two transposed
  alignas(64) real dout[HEAD_DIM_V * BLOCK_Q];
  alignas(64) real dquery[HEAD_DIM_QK * BLOCK_Q];
  alignas(64) real weights[round_up(BLOCK_KV, rows_for(VECTORS)) * BLOCK_Q];   // S^T, then P^T
  alignas(64) real dscores[round_up(BLOCK_KV, rows_for(VECTORS)) * BLOCK_Q];  // dP^T, then dS^T
  alignas(64) real lse[BLOCK_Q];                                              // base 2; +inf for a row without keys, so that its weights are 0
  alignas(64) real delta[BLOCK_Q];
  alignas(64) real key[CONVERT ? BLOCK_KV * HEAD_DIM_QK : 1];
  alignas(64) real value[CONVERT ? BLOCK_KV * HEAD_DIM_V : 1];
};

struct Task {
  const Params& params;
  const Uniform uniform;
  const Item at;
  int b, h, q_first, rows;
  real *dk, *dv;  // sums of this task, [key][ROW_QK] and [key][ROW_V]
};

// Query, dO, lse and delta of the tile. A row without keys is made of zeros: whatever its dO holds, nothing comes of it.
FG_FN void load_tile(const Task& task, Scratch& scratch) {
  const Params& p = task.params;
  const long long row = task.at.q_start + task.q_first, statistics = task.b * p.lse_stride_b + task.h * p.lse_stride_h + row;
  const T* const query = p.q + task.b * p.q_stride_b + task.h * p.q_stride_h + row * p.q_stride_l;
  const T* const dout = p.dout + task.b * p.dout_stride_b + task.h * p.dout_stride_h + row * p.dout_stride_l;
  const T* const out = p.out + task.b * p.out_stride_b + task.h * p.out_stride_h + row * p.out_stride_l;
  load_rows<HEAD_DIM_QK, ROW_QK, BLOCK_Q>(query, p.q_stride_l, task.rows, p.scale, scratch.query_rows);
  load_rows<HEAD_DIM_V, ROW_V, BLOCK_Q>(dout, p.dout_stride_l, task.rows, real(1), scratch.dout_rows);
  for (int lane = 0; lane < BLOCK_Q; ++lane) {
    const real lse = lane < task.rows ? p.lse[statistics + lane] : -infinity<real>();
    const bool empty = lse == -infinity<real>();
    real delta = 0;
    if (empty) {
      for (int d = 0; d < ROW_QK; ++d) scratch.query_rows[lane * ROW_QK + d] = 0;
      for (int d = 0; d < ROW_V; ++d) scratch.dout_rows[lane * ROW_V + d] = 0;
    } else {
      delta = dot<HEAD_DIM_V>(scratch.dout_rows + lane * ROW_V, out + lane * p.out_stride_l);
    }
    scratch.lse[lane] = empty ? infinity<real>() : lse * real(LOG2E);
    scratch.delta[lane] = delta;
    if (lane < task.rows) p.delta[statistics + lane] = delta;
  }
  transpose_rows<HEAD_DIM_QK, ROW_QK, BLOCK_Q>(scratch.query_rows, scratch.query);
  transpose_rows<HEAD_DIM_V, ROW_V, BLOCK_Q>(scratch.dout_rows, scratch.dout);
}

FG_FN bool visible(const Task& task, const Row* rows, int lane, int k) {
  return mask(task.params, task.uniform, rows[lane], col(task.params, task.uniform, k), task.q_first + lane, k);
}

// One key against all lanes: s becomes the weight P = 2^(score * factor - lse), dp becomes dS.
FG_FN void differentiate(const Task& task, const Row* rows, int k, bool partial, bool exact, real factor, const Scratch& scratch, real* __restrict s, real* __restrict dp) {
  const Col column = col(task.params, task.uniform, k);
  alignas(64) real slope[BLOCK_Q];
  for (int lane = 0; lane < BLOCK_Q; ++lane) score_grad(task.params, task.uniform, rows[lane], column, s[lane], task.q_first + lane, k, s[lane], slope[lane]);
  if (partial) {
    for (int lane = 0; lane < BLOCK_Q; ++lane) {
      const bool seen = mask(task.params, task.uniform, rows[lane], column, task.q_first + lane, k);
      s[lane] = seen ? s[lane] : -infinity<real>();
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < VECTORS; ++j) {
    const vec weight = fg::exp2(load(s + j * WIDTH) * factor - load(scratch.lse + j * WIDTH));
    vec gradient = weight * (load(dp + j * WIDTH) - load(scratch.delta + j * WIDTH));
    gradient = weight == real(0) ? vec{} : gradient;  // a masked dP may be NaN
    gradient = weight == real(0) ? vec{} : gradient * load(slope + j * WIDTH);
    store(s + j * WIDTH, weight);
    store(dp + j * WIDTH, gradient);
  }
}

// One tile of rows against all keys it sees. exact: dQ alone, with masked products left out one by one in partial tiles.
FG_FN void walk_keys(const Task& task, bool exact, Scratch& scratch) {
  const Params& p = task.params;
  const int q_last = task.q_first + task.rows - 1;
  Row rows[BLOCK_Q];
  for (int lane = 0; lane < BLOCK_Q; ++lane) rows[lane] = row(p, task.uniform, task.q_first + lane);
  for (int i = 0; i < HEAD_DIM_QK * VECTORS; ++i) store(scratch.dquery + i * WIDTH, vec{});
  const T* const keys = p.k + task.b * p.k_stride_b + task.h / GROUP * p.k_stride_h + task.at.k_start * p.k_stride_l;
  const T* const values = p.v + task.b * p.v_stride_b + task.h / GROUP * p.v_stride_h + task.at.k_start * p.v_stride_l;
  const Range seen = kv_range(p, task.uniform, task.q_first, q_last);

  for (int k_first = seen.begin; k_first < seen.end; k_first += BLOCK_KV) {
    const int count = int_min(BLOCK_KV, seen.end - k_first);
    const int kind = tile_class(p, task.uniform, task.q_first, q_last, k_first, k_first + count - 1);
    if (kind == EMPTY) continue;
    const bool partial = kind == PARTIAL;
    long long key_stride = p.k_stride_l;
    const real* const key = rows_as_real<HEAD_DIM_QK>(keys + k_first * key_stride, key_stride, count, scratch.key);
    multiply_rows<VECTORS>(key, key_stride, count, scratch.query, HEAD_DIM_QK, scratch.weights);
    long long value_stride = p.v_stride_l;
    const real* const value = rows_as_real<HEAD_DIM_V>(values + k_first * value_stride, value_stride, count, scratch.value);
    multiply_rows<VECTORS>(value, value_stride, count, scratch.dout, HEAD_DIM_V, scratch.dscores);
    for (int n = 0; n < count; ++n) {
      differentiate(task, rows, k_first + n, partial, exact, LOG2E, scratch, scratch.weights + n * BLOCK_Q, scratch.dscores + n * BLOCK_Q);
    }
    if (exact) {
      if (partial) {
        accumulate_visible_columns<HEAD_DIM_QK, VECTORS>(key, key_stride, count, scratch.dscores, nullptr, scratch.dquery,
                                                         [&](int n, int lane) { return visible(task, rows, lane, k_first + n); });
      } else {
        accumulate_columns<HEAD_DIM_QK, VECTORS>(key, key_stride, count, scratch.dscores, nullptr, scratch.dquery);
      }
      continue;
    }
    accumulate_rows<ROW_V>(scratch.weights, BLOCK_Q, count, scratch.dout_rows, task.rows, task.dv + (long long)k_first * ROW_V);
    accumulate_rows<ROW_QK>(scratch.dscores, BLOCK_Q, count, scratch.query_rows, task.rows, task.dk + (long long)k_first * ROW_QK);
    accumulate_columns<HEAD_DIM_QK, VECTORS>(key, key_stride, count, scratch.dscores, nullptr, scratch.dquery);
  }
}

void run(const Task& task, Scratch& scratch) {
  load_tile(task, scratch);
  // NaN or Inf in dQ is rare and may come from a masked key: only then is it computed again, exactly.
  for (int attempt = 0; attempt < 2; ++attempt) {
    walk_keys(task, attempt == 1, scratch);
    if (all_finite(scratch.dquery, HEAD_DIM_QK * BLOCK_Q)) break;
  }
  const Params& p = task.params;
  alignas(64) real factor[BLOCK_Q];
  for (int lane = 0; lane < BLOCK_Q; ++lane) factor[lane] = p.scale;
  T* const dq = p.dq + task.b * p.dq_stride_b + task.h * p.dq_stride_h + (task.at.q_start + task.q_first) * p.dq_stride_l;
  store_transposed<HEAD_DIM_QK, BLOCK_Q>(scratch.dquery, factor, task.rows, dq, p.dq_stride_l);
}

// Elements of the sums of one task: rows of dK, then rows of dV.
struct Sums {
  long long dk_size, size;
  explicit Sums(const Params& p) : dk_size(round_up<long long>(p.kv_len, 32) * ROW_QK), size(dk_size + round_up<long long>(p.kv_len, 32) * ROW_V) {}
};

// Adds up the sums of all parts, in their order, and stores keys first..last-1 of one gradient; keys that are not in use get 0.
template <int DIM, int ROW>
FG_FN void store_sums(const real* sums, long long part_size, int parts, int first, int last, int in_use, real factor, T* target, long long stride) {
  for (int k = first; k < last; ++k) {
    real total[DIM] = {};
    for (int part = 0; part < (k < in_use ? parts : 0); ++part) {
      for (int d = 0; d < DIM; ++d) total[d] += sums[part * part_size + (long long)k * ROW + d];
    }
    for (int d = 0; d < DIM; ++d) target[k * stride + d] = from_real<T>(total[d] * factor);
  }
}

// Slice `slice` of `slices` of the keys of one kv head.
void store_head(const Params& p, int b, int kv_head, const Sums& sums, const real* first_part, int parts, int slice, int slices) {
  const Item at = item(p, b);
  const long long keys = p.kv_len;
  const int first = (int)(keys * slice / slices), last = (int)(keys * (slice + 1) / slices);
  store_sums<HEAD_DIM_QK, ROW_QK>(first_part, sums.size, parts, first, last, at.lens.kv_len, 1,
                                  p.dk + b * p.dk_stride_b + kv_head * p.dk_stride_h + at.k_start * p.dk_stride_l, p.dk_stride_l);
  store_sums<HEAD_DIM_V, ROW_V>(first_part + sums.dk_size, sums.size, parts, first, last, at.lens.kv_len, 1,
                                p.dv + b * p.dv_stride_b + kv_head * p.dv_stride_h + at.k_start * p.dv_stride_l, p.dv_stride_l);
}

// How many tasks share a kv head: the fewest that keep at least nine tenths of the threads busy.
int choose_parts(long long heads, long long most, int threads) {
  int best = 1;
  double best_use = 0;
  for (int parts = 1; parts <= most && parts <= 2 * threads; ++parts) {
    const long long tasks = heads * parts, turns = (tasks + threads - 1) / threads;
    const double use = (double)tasks / (double)(turns * threads);
    if (use > best_use) best = parts, best_use = use;
    if (use >= 0.9) break;
  }
  return best;
}

}  // namespace

// Returns 0, or 1 if memory ran out. `threads` is the number of OpenMP threads to use; for a fixed number results repeat bit by bit.
extern "C" int fg_backward(const Params* p, int threads) {
  const int q_tiles = (p->q_len + BLOCK_Q - 1) / BLOCK_Q, units = q_tiles * GROUP;
  const long long heads = (long long)p->batch * p->kv_heads;
  threads = useful_threads((double)heads * GROUP * p->q_len * p->kv_len * (3 * HEAD_DIM_QK + 2 * HEAD_DIM_V), threads);
  const int parts = choose_parts(heads, units, threads);
  const long long tasks = heads * parts;
  const Sums sums(*p);
  const Buffer buffer(sums.size * (parts > 1 ? tasks : (long long)threads));  // per thread when one task walks a head, which is then stored at once
  if (!buffer.data) return 1;
  const int turn = tasks_per_turn(tasks, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    static thread_local Scratch storage;
    Scratch& scratch = in_register(storage);
    const FlushSubnormals flush;
    const Params& own = *p;
#pragma omp for schedule(dynamic, turn)
    for (long long i = 0; i < tasks; ++i) {
      const int b = (int)(i / parts / p->kv_heads), kv_head = (int)(i / parts % p->kv_heads), part = (int)(i % parts);
      const Item at = item(*p, b);
      real* const dk = buffer.data + (parts > 1 ? i : thread_index()) * sums.size;
      real* const dv = dk + sums.dk_size;
      memset(dk, 0, sums.size * sizeof(real));
      for (int unit = part; unit < units; unit += parts) {
        const int h = kv_head * GROUP + unit / q_tiles, q_first = unit % q_tiles * BLOCK_Q;
        if (q_first >= at.lens.q_len) continue;
        run(Task{own, uniform(own, at.lens, b, h), at, b, h, q_first, int_min(BLOCK_Q, at.lens.q_len - q_first), dk, dv}, scratch);
      }
      if (parts == 1) store_head(*p, b, kv_head, sums, dk, 1, 0, 1);
    }
    if (parts > 1) {
#pragma omp for schedule(static)
      for (long long i = 0; i < tasks; ++i) {
        const long long head = i / parts;
        store_head(*p, (int)(head / p->kv_heads), (int)(head % p->kv_heads), sums, buffer.data + head * parts * sums.size, parts, (int)(i % parts), parts);
      }
    }
  }
  return 0;
}
