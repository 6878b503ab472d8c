// Attention forward written by flashgen: cpu, bfloat16, head dims 64/64, family cpu.
// Keys of a row: k <= q + kv_len - q_len.
// Tiles are empty, full or partial by interval evaluation.
// Score: a general function of s, 3 operations per pair, 0 of them loads.

// Flash attention forward in bfloat16 on AMX tile registers: one task per (batch item, head, tile of BLOCK_Q query rows), keys in tiles of BLOCK_KV.
//
// Everything is transposed: lanes run along the query rows, so that maxima and sums over keys are plain vector operations.
//   S^T[key][lane] = K Q^T     O^T[d][lane] += V^T P^T
// Left factors are rows of K where they lie, and V^T, transposed once per kv head in blocks of 32 keys; right factors are Q^T and P^T as pairs of neighbours
// along the depth. P is rounded to bfloat16, its sums are those of the unrounded weights.
// A pipeline runs over blocks of 32 keys. While vectors turn a block's q . k into scores, tile registers compute the next block's q . k; while vectors
// exponentiate, tile registers add the products of the tile of keys before to O^T. Both streams of instructions take turns step by step, close enough for a
// processor to run them together.
// b, h: batch item, query head (kv head h / GROUP). q_first, k_first: first row and key of a tile, k_first a multiple of 32; lane: row - q_first;
// n: key - k_first. count: keys of a tile that exist; room: count rounded up to 32. Nothing past a length is read.
#include "fg/base.h"

#define FG_COARSE 1  // 16-bit inputs: functions of the score may be as coarse as they are
using real = float;        // scores, statistics, captured floats
using T = fg::bf16;  // q, k, v, out

constexpr int HEAD_DIM_QK = 64;
constexpr int HEAD_DIM_V = 64;
constexpr int GROUP = 1;  // query heads per kv head
constexpr int AMX = 1;
constexpr int BLOCK_KV = 64;
constexpr int BLOCK_Q = 32;

#include "fg/interval.h"
#include "fg/math.h"
#include "fg/cpu/vector.h"
#include "fg/cpu/product.h"
#include "fg/cpu/softmax.h"
#include "fg/cpu/tile.h"
#include "fg/cpu/parallel.h"
#include "fg/cpu/amx_pack.h"
#include "fg/cpu/amx_softmax.h"

struct Params {
  const T* q;
  const T* k;
  const T* v;
  T* out;
  real* lse;
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
  u.u0 = fg::divide(1.0f, p.float_1) * p.scale;
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

// what score() is still to be multiplied by
FG_FN real gain(const Params& p, const Uniform& u) {
  return p.float_0;
}

// s is q . k; q - k is d + step, where step is a number in an unrolled loop
FG_FN real score(const Params& p, const Uniform& u, const Row& r, const Col& c, real s, int q, int k, int d, int step) {
  return fg::tanh(s * u.u0);
}

// the same where |s| is at most near(): tanh is a short polynomial there
FG_FN real score_near(const Params& p, const Uniform& u, const Row& r, const Col& c, real s, int q, int k, int d, int step) {
  return fg::tanh_near(s * u.u0);
}

FG_FN real near(const Params& p, const Uniform& u) {
  return fg::NEAR_TANH / fg::abs(u.u0);
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

constexpr int VECTORS = BLOCK_Q / WIDTH;
static_assert(BLOCK_Q == 32 && BLOCK_KV % 32 == 0, "products are made of two by two tile registers");
constexpr int DEPTH_QK = round_up(HEAD_DIM_QK, 32), DEPTH_V = round_up(HEAD_DIM_V, 32);
constexpr bool KEYS_IN_PLACE = HEAD_DIM_QK == DEPTH_QK;  // else rows are copied to be padded with zeros

struct Scratch {
  alignas(64) bf16 query_rows[BLOCK_Q * DEPTH_QK];
  alignas(64) unsigned query[DEPTH_QK / 2 * BLOCK_Q];       // pairs of Q^T
  alignas(64) float scores[2][32 * BLOCK_Q];                // S^T of this block of keys and of the next
  alignas(64) unsigned weights[2][BLOCK_KV / 2 * BLOCK_Q];  // pairs of P^T of this tile of keys and of the one before
  alignas(64) float out[DEPTH_V * BLOCK_Q];                 // O^T, not yet divided by the sum of weights
  alignas(64) bf16 key[BLOCK_KV * DEPTH_QK];
};

struct Task {
  const Params& params;
  const Uniform uniform;
  const Item at;
  int b, h, q_first, rows;  // rows: query rows of the tile that exist
  const bf16* values;       // V^T of the kv head, [key / 32][DEPTH_V][32]
};

// scores[n][lane], q . k of `count` keys from k_first on, becomes the user's score without its gain.
template <bool NEAR>
FG_FN void apply_score(const Task& task, const Row* rows, int k_first, int count, real* __restrict scores) {
  for (int n = 0; n < count; ++n) {
    const int k = k_first + n, distance = task.q_first - k;
    const Col column = col(task.params, task.uniform, k);
    for (int lane = 0; lane < BLOCK_Q; ++lane) {
      real& s = scores[n * BLOCK_Q + lane];
      if constexpr (NEAR) s = score_near(task.params, task.uniform, rows[lane], column, s, task.q_first + lane, k, distance, lane);
      else s = score(task.params, task.uniform, rows[lane], column, s, task.q_first + lane, k, distance, lane);
    }
  }
}

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

// O^T += V^T P^T key by key with the masked products left out: 0 * NaN must not reach a row that does not see the key. Slow and rare.
void accumulate_visible_pairs(const Task& task, const Row* rows, int k_first, int count, const unsigned* weights, float* out) {
  const Params& p = task.params;
  for (int n = 0; n < count; ++n) {
    const bf16* const value = p.v + task.b * p.v_stride_b + task.h / GROUP * p.v_stride_h + (task.at.k_start + k_first + n) * p.v_stride_l;
    for (int lane = 0; lane < BLOCK_Q; ++lane) {
      if (!visible(task, rows, lane, k_first + n)) continue;
      const float weight = to_real(bf16{(unsigned short)(weights[n / 2 * BLOCK_Q + lane] >> (n % 2 * 16))});
      for (int d = 0; d < HEAD_DIM_V; ++d) out[d * BLOCK_Q + lane] += weight * to_real(value[d]);
    }
  }
}

struct KeyTile {
  int k_first, count, room, kind;
  const bf16* key;  // its rows, `room` of them
  long long key_stride;
};

// The first tile with a visible key among those that begin at k_first and later.
FG_FN bool find_tile(const Task& task, Range seen, int k_first, Scratch& scratch, KeyTile& tile) {
  const Params& p = task.params;
  for (;; k_first += BLOCK_KV) {
    if (k_first >= seen.end) return false;
    tile.kind = tile_class(p, task.uniform, task.q_first, task.q_first + task.rows - 1, k_first, int_min(k_first + BLOCK_KV, seen.end) - 1);
    if (tile.kind != EMPTY) break;
  }
  tile.k_first = k_first;
  tile.count = int_min(BLOCK_KV, seen.end - k_first);
  tile.room = round_up(tile.count, 32);
  tile.key = p.k + task.b * p.k_stride_b + task.h / GROUP * p.k_stride_h + (task.at.k_start + k_first) * p.k_stride_l;
  tile.key_stride = p.k_stride_l;
  if (!KEYS_IN_PLACE || k_first + tile.room > task.at.lens.kv_len) {
    pack_rows<HEAD_DIM_QK, DEPTH_QK>(tile.key, tile.key_stride, tile.count, tile.room, scratch.key);
    tile.key = scratch.key;
    tile.key_stride = DEPTH_QK;
  }
  return true;
}

// `count` keys of a tile from its key n on: q . k becomes the score, -inf where there is no key or none that is seen.
FG_FN void finish_scores(const Task& task, const Row* rows, const KeyTile& tile, int n, int count, float* scores) {
  if (any_beyond<VECTORS>(scores, count, near(task.params, task.uniform))) apply_score<false>(task, rows, tile.k_first + n, count, scores);
  else apply_score<true>(task, rows, tile.k_first + n, count, scores);
  if (tile.kind == PARTIAL) apply_mask(task, rows, tile.k_first + n, count, scores);
  for (int i = int_max(tile.count - n, 0) * VECTORS; i < count * VECTORS; ++i) store(scores + i * WIDTH, broadcast(-infinity<float>()));
}

// O^T += V^T P^T of `count` keys (a multiple of 32), still to be done for the rows of O^T from d on.
struct Products {
  const bf16* values;
  const unsigned* weights;
  int count, d;
};

FG_FN void begin_square(const Products& left, float* out) { square_load<BLOCK_Q>(out + left.d * BLOCK_Q); }
FG_FN void add_to_square(const Products& left, int n) {
  square_multiply<BLOCK_Q>(left.values + (long long)n * DEPTH_V + left.d * 32, 32, left.weights + n / 2 * BLOCK_Q);
}

FG_FN void end_square(Products& left, float* out) {
  square_store<BLOCK_Q>(out + left.d * BLOCK_Q);
  left.d += 32;
}

FG_FN void finish_products(Products& left, float* out) {
  while (left.d < DEPTH_V) {
    begin_square(left, out);
    for (int n = 0; n < left.count; n += 32) add_to_square(left, n);
    end_square(left, out);
  }
}

// The products of keys n .. n + count - 1 of a tile, whose pairs of weights begin at `weights`.
FG_FN Products products(const Task& task, bool exact, const Row* rows, const KeyTile& tile, int n, int count, unsigned* weights, float* out) {
  if (exact) {
    accumulate_visible_pairs(task, rows, tile.k_first + n, int_min(count, tile.count - n), weights, out);
    count = 0;
  }
  return Products{task.values + (long long)(tile.k_first + n) * DEPTH_V, weights, count, count ? 0 : DEPTH_V};
}

constexpr int BLOCKS = BLOCK_KV / 32;
constexpr int STEPS_QK = DEPTH_QK / 32;                            // of the depth of a block's q . k
constexpr int SQUARES = (DEPTH_V / 32 + BLOCKS - 1) / BLOCKS;      // squares of O^T to which a tile's products are added during each block of the next
constexpr int STEPS_V = SQUARES * BLOCKS;
constexpr int share(int step, int steps) { return 16 * step / steps * 2; }  // first of the 32 keys of a block whose vectors go with a step

// The softmax and O^T of one tile of rows. exact: masked products are left out one by one.
FG_FN void attend(const Task& task, bool exact, Scratch& scratch, Softmax<VECTORS>& softmax) {
  const Params& p = task.params;
  Row rows[BLOCK_Q];
  for (int lane = 0; lane < BLOCK_Q; ++lane) rows[lane] = row(p, task.uniform, task.q_first + lane);
  const float factor = gain(p, task.uniform) * (float)LOG2E;
  softmax.reset();
  for (int j = 0; j < VECTORS; ++j) softmax.reference[j] = vec{};  // for good: no exponential of these scores is too large or too small
  for (int i = 0; i < DEPTH_V * VECTORS; ++i) store(scratch.out + i * WIDTH, vec{});
  const Range seen = kv_range(p, task.uniform, task.q_first, task.q_first + task.rows - 1);
  KeyTile tile{}, next{};
  bool more = find_tile(task, seen, seen.begin & ~31, scratch, next);
  if (more) tile_scores<DEPTH_QK, BLOCK_Q>(next.key, next.key_stride, scratch.query, scratch.scores[0]);

  Products left{nullptr, nullptr, 0, DEPTH_V};  // of the tile before
  int turn = 0, side = 0;
  while (more) {
    tile = next;
    unsigned* const weights = scratch.weights[side ^= 1];
    for (int n = 0; n < tile.room; n += 32, turn ^= 1) {
      float* const scores = scratch.scores[turn];
      const bool last = n + 32 == tile.room;
      if (last) more = find_tile(task, seen, tile.k_first + BLOCK_KV, scratch, next);
      const KeyTile& source = last ? next : tile;
      const bf16* const key = source.key + (last ? 0 : n + 32) * source.key_stride;

      // The next block's q . k on tile registers beside this block's scores on vectors.
      if (more) square_zero();
      for (int step = 0; step < STEPS_QK; ++step) {
        if (more) square_multiply<BLOCK_Q>(key + step * 32, source.key_stride, scratch.query + step * 16 * BLOCK_Q);
        const int first = share(step, STEPS_QK), count = share(step + 1, STEPS_QK) - first;
        finish_scores(task, rows, tile, n + first, count, scores + first * BLOCK_Q);
      }
      if (more) square_store<BLOCK_Q>(scratch.scores[turn ^ 1]);

      // The products of the tile before on tile registers beside this block's exponentials on vectors.
      vec reference[VECTORS];
      for (int j = 0; j < VECTORS; ++j) reference[j] = finite_reference(softmax.reference[j]);
      for (int step = 0; step < STEPS_V; ++step) {
        const bool adds = left.d < DEPTH_V;
        const int m = step % BLOCKS * 32, first = share(step, STEPS_V), count = share(step + 1, STEPS_V) - first;
        if (adds && m == 0) begin_square(left, scratch.out);
        if (adds && m < left.count) add_to_square(left, m);
        weigh_pairs<VECTORS>(reference, softmax.total, scores + first * BLOCK_Q, count, factor, weights + (n + first) / 2 * BLOCK_Q);
        if (adds && m == BLOCK_KV - 32) end_square(left, scratch.out);
      }
    }
    finish_products(left, scratch.out);
    left = products(task, exact, rows, tile, 0, tile.room, weights, scratch.out);
  }
  finish_products(left, scratch.out);
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
  }
  T* const out = p.out + task.b * p.out_stride_b + task.h * p.out_stride_h + (task.at.q_start + task.q_first) * p.out_stride_l;
  store_transposed<HEAD_DIM_V, BLOCK_Q>(scratch.out, factor, task.rows, out, p.out_stride_l);
}

void run(const Task& task, Scratch& scratch) {
  const Params& p = task.params;
  const bf16* const query = p.q + task.b * p.q_stride_b + task.h * p.q_stride_h + (task.at.q_start + task.q_first) * p.q_stride_l;
  pack_rows<HEAD_DIM_QK, DEPTH_QK>(query, p.q_stride_l, task.rows, BLOCK_Q, scratch.query_rows);
  pair_columns<DEPTH_QK, BLOCK_Q>(scratch.query_rows, scratch.query);
  Softmax<VECTORS> softmax;
  // NaN or Inf in the result is rare and may come from a masked value: only then is the tile done again, exactly.
  for (int attempt = 0; attempt < 2; ++attempt) {
    attend(task, attempt == 1, scratch, softmax);
    if (all_finite(scratch.out, HEAD_DIM_V * BLOCK_Q)) break;
  }
  finish(task, scratch, softmax);
}

// Where the transposed keys of a batch item begin, in blocks of 32.
long long first_block(const Params& p, int b) {
  return b * ((p.kv_len + 31ll) / 32);
}

// The rows of K or V of every kv head, transposed in blocks of 32 keys: target[kv head][block][DEPTH][32]. Called by all threads of a parallel region.
template <int DIM, int DEPTH>
void transpose_heads(const Params& p, const bf16* source, long long stride_b, long long stride_h, long long stride_l, int threads, bf16* target) {
  const long long blocks = first_block(p, p.batch), heads = (long long)p.batch * p.kv_heads;
  const int slices = heads < 8 * threads ? 16 : 1;  // tasks per head
  const int turn = tasks_per_turn(heads * slices, threads);
#pragma omp for schedule(dynamic, turn)
  for (long long i = 0; i < heads * slices; ++i) {
    const int b = (int)(i / slices / p.kv_heads), kv_head = (int)(i / slices % p.kv_heads), slice = (int)(i % slices);
    const Item at = item(p, b);
    const bf16* const rows = source + b * stride_b + kv_head * stride_h + at.k_start * stride_l;
    bf16* const head = target + (kv_head * blocks + first_block(p, b)) * 32 * DEPTH;
    const int in_use = (at.lens.kv_len + 31) / 32;
    for (int block = in_use * slice / slices; block < in_use * (slice + 1) / slices; ++block) {
      pack_transposed<DIM, DEPTH>(rows + block * 32 * stride_l, stride_l, int_min(32, at.lens.kv_len - block * 32), head + (long long)block * 32 * DEPTH);
    }
  }
}
}  // namespace

// Returns 0, 1 if memory for V^T ran out, or 2 if the system denies the tile registers. `threads` is the number of OpenMP threads to use.
extern "C" int fg_forward(const Params* p, int threads) {
  if (!tiles_allowed()) return 2;
  threads = useful_threads((double)p->batch * p->heads * p->q_len * p->kv_len * (HEAD_DIM_QK + HEAD_DIM_V) / 4, threads);
  const long long blocks = first_block(*p, p->batch);
  const Buffer buffer((blocks * p->kv_heads * 32 * DEPTH_V + 1) / 2);
  if (!buffer.data) return 1;
  bf16* const values = (bf16*)buffer.data;  // [kv head][block][DEPTH_V][32]
  const int q_tiles = (p->q_len + BLOCK_Q - 1) / BLOCK_Q;
  const long long tasks = (long long)p->batch * p->heads * q_tiles;
  const int turn = tasks_per_turn(tasks, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    static thread_local Scratch storage;
    Scratch& scratch = in_register(storage);
    const FlushSubnormals flush;
    const TileSession session;
    transpose_heads<HEAD_DIM_V, DEPTH_V>(*p, p->v, p->v_stride_b, p->v_stride_h, p->v_stride_l, threads, values);
#pragma omp for schedule(dynamic, turn)
    for (long long i = 0; i < tasks; ++i) {
      // Last tiles first: under a causal mask they are the longest.
      const int b = (int)(i / ((long long)p->heads * q_tiles)), h = (int)(i / q_tiles % p->heads), q_first = (int)(q_tiles - 1 - i % q_tiles) * BLOCK_Q;
      const Item at = item(*p, b);
      if (q_first >= at.lens.q_len) continue;
      const bf16* const head_values = values + (h / GROUP * blocks + first_block(*p, b)) * 32 * DEPTH_V;
      run(Task{*p, uniform(*p, at.lens, b, h), at, b, h, q_first, int_min(BLOCK_Q, at.lens.q_len - q_first), head_values}, scratch);
    }
  }
  return 0;
}
