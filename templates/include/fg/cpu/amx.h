// Tile registers of Intel AMX, one wrapper per instruction, and the products of bfloat16 tiles built from them.
// A tile register holds 16 rows of 64 bytes: 16 x 16 floats, 16 x 32 bf16 (a left factor: row, depth) or 16 x 16 pairs of bf16 (a right factor: depth / 2,
// column; a pair is two neighbours along the depth). Intel SDM volume 1, chapter 18, and volume 2 for the instructions.
// With FG_AMX_EMULATE the same operations run on arrays in memory, so that kernels can be tested where there is no AMX.
#pragma once
#include "fg/cpu/vector.h"

#if !defined(FG_AMX_EMULATE)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fg {

constexpr int TILE_ROWS = 16;   // rows of a tile register
constexpr int TILE_DEPTH = 32;  // bf16 elements of a row
static_assert(FG_VECTOR_BYTES == 64 && SINGLE, "a vector is one row of a tile of floats");

#if defined(FG_AMX_EMULATE)

static thread_local unsigned char emulated_tiles[8][16][64];

FG_FN bool tiles_allowed() { return true; }
struct TileSession { TileSession() {} };
template <int TILE> FG_FN void tile_zero() { memset(emulated_tiles[TILE], 0, 1024); }
template <int TILE> FG_FN void tile_load(const void* rows, long long stride_bytes) {
  for (int i = 0; i < 16; ++i) memcpy(emulated_tiles[TILE][i], (const char*)rows + i * stride_bytes, 64);
}
template <int TILE> FG_FN void tile_store(void* rows, long long stride_bytes) {
  for (int i = 0; i < 16; ++i) memcpy((char*)rows + i * stride_bytes, emulated_tiles[TILE][i], 64);
}
template <int SUM, int A, int B> FG_FN void tile_multiply() {
  float sum[16][16];
  bf16 a[16][32], b[16][32];
  memcpy(sum, emulated_tiles[SUM], 1024);
  memcpy(a, emulated_tiles[A], 1024);
  memcpy(b, emulated_tiles[B], 1024);
  for (int i = 0; i < 16; ++i) {
    for (int c = 0; c < 32; ++c) {
      for (int j = 0; j < 16; ++j) sum[i][j] += to_real(a[i][c]) * to_real(b[c / 2][2 * j + c % 2]);
    }
  }
  memcpy(emulated_tiles[SUM], sum, 1024);
}

#else

// Linux keeps the tile registers from a process until it asks once: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
FG_FN bool tiles_allowed() {
  static const bool allowed = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return allowed;
}

// While one lives, this thread's eight tile registers are configured: palette 1, 16 rows of 64 bytes each.
struct TileSession {
  TileSession() {
    struct { unsigned char palette, start_row, reserved[14]; unsigned short row_bytes[16]; unsigned char rows[16]; } config{};
    config.palette = 1;
    for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = 16;
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  ~TileSession() { asm volatile("tilerelease"); }
};
template <int TILE> FG_FN void tile_zero() { asm volatile("tilezero %%tmm%c0" : : "i"(TILE)); }
template <int TILE> FG_FN void tile_load(const void* rows, long long stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(stride_bytes), "i"(TILE) : "memory");
}
template <int TILE> FG_FN void tile_store(void* rows, long long stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(rows), "r"(stride_bytes), "i"(TILE) : "memory");
}
// SUM += A B, products of bf16 summed in float; subnormal factors count as zero
template <int SUM, int A, int B> FG_FN void tile_multiply() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B)); }

#endif

// Lane i of the result: bf16 of even[i] in its lower half, of odd[i] in its upper half; a pair of a right factor.
typedef unsigned pairs __attribute__((vector_size(FG_VECTOR_BYTES), may_alias));
FG_FN pairs round_to_pairs(vec even, vec odd) {
#if defined(__AVX512BF16__)
  typedef unsigned short halves __attribute__((vector_size(FG_VECTOR_BYTES)));
  const halves interleave = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  halves rounded, result;
  asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(rounded) : "v"(even), "v"(odd));  // even in the lower 32 bytes
  asm("vpermw %1, %2, %0" : "=v"(result) : "v"(rounded), "v"(interleave));
  return (pairs)result;
#else
  const pairs e = (pairs)even, o = (pairs)odd;
  const pairs low = (e + 0x7fffu + (e >> 16 & 1u)) >> 16, high = (o + 0x7fffu + (o >> 16 & 1u)) & 0xffff0000u;
  return (pairs)((even != even) ? (e >> 16 | 0x40u) : low) | (pairs)((odd != odd) ? (o | 0x400000u) & 0xffff0000u : high);
#endif
}

// Row of a left factor: bf16 of 32 floats, `low` in front of `high`.
FG_FN pairs round_to_row(vec low, vec high) {
#if defined(__AVX512BF16__)
  pairs rounded;
  asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(rounded) : "v"(low), "v"(high));
  return rounded;
#else
  bf16 row[32];
  for (int i = 0; i < 16; ++i) row[i] = from_real<bf16>(low[i]), row[16 + i] = from_real<bf16>(high[i]);
  pairs rounded;
  memcpy(&rounded, row, 64);
  return rounded;
#endif
}

// A square of sums, 32 x 32 floats at `at` with rows of LANES elements, lives in tile registers 0 to 3; 4 to 7 hold the factors of a step of 32 of the depth.
FG_FN void square_zero() {
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
}
template <int LANES>
FG_FN void square_load(const float* at) {
  tile_load<0>(at, LANES * 4);
  tile_load<1>(at + TILE_ROWS, LANES * 4);
  tile_load<2>(at + TILE_ROWS * LANES, LANES * 4);
  tile_load<3>(at + TILE_ROWS * LANES + TILE_ROWS, LANES * 4);
}
template <int LANES>
FG_FN void square_store(float* at) {
  tile_store<0>(at, LANES * 4);
  tile_store<1>(at + TILE_ROWS, LANES * 4);
  tile_store<2>(at + TILE_ROWS * LANES, LANES * 4);
  tile_store<3>(at + TILE_ROWS * LANES + TILE_ROWS, LANES * 4);
}
// sums += left right: 32 rows of the left factor, left_stride elements apart, and 16 rows of LANES pairs of the right one.
template <int LANES>
FG_FN void square_multiply(const bf16* left, long long left_stride, const unsigned* right) {
  tile_load<4>(left, left_stride * 2);
  tile_load<6>(right, LANES * 4);
  tile_multiply<0, 4, 6>();
  tile_load<7>(right + TILE_ROWS, LANES * 4);
  tile_multiply<1, 4, 7>();
  tile_load<5>(left + TILE_ROWS * left_stride, left_stride * 2);
  tile_multiply<2, 5, 6>();
  tile_multiply<3, 5, 7>();
}

// scores[key][query] of 32 keys and 32 queries: rows of K against pairs of Q^T. DEPTH is a multiple of 32; both strides of `query` and `scores` are LANES elements.
template <int DEPTH, int LANES>
FG_FN void tile_scores(const bf16* key, long long key_stride, const unsigned* query, float* scores) {
  square_zero();
#pragma GCC unroll 4
  for (int d = 0; d < DEPTH; d += TILE_DEPTH) square_multiply<LANES>(key + d, key_stride, query + d / 2 * LANES);
  square_store<LANES>(scores);
}

// target[d][lane] += sum over keys of left[key / 32][d][key % 32] * right[key / 2][lane], 32 lanes, d < DIM (a multiple of 32), `count` keys (likewise).
template <int DIM, int LANES>
FG_FN void tile_accumulate(const bf16* left, int count, const unsigned* right, float* target) {
  for (int d = 0; d < DIM; d += 2 * TILE_ROWS) {
    square_load<LANES>(target + d * LANES);
    for (int n = 0; n < count; n += TILE_DEPTH) square_multiply<LANES>(left + (long long)n * DIM + d * TILE_DEPTH, TILE_DEPTH, right + n / 2 * LANES);
    square_store<LANES>(target + d * LANES);
  }
}

// target[key][d] += sum over lanes of left[key][lane] * right[lane / 2][d], `count` keys (a multiple of 32), LANES lanes (likewise), d < DIM (likewise).
template <int DIM, int LANES>
FG_FN void tile_accumulate_rows(const bf16* left, int count, const unsigned* right, float* target) {
  const long long row_bytes = DIM * 4, left_bytes = LANES * 2;
  for (int n = 0; n < count; n += 2 * TILE_ROWS) {
    for (int d = 0; d < DIM; d += 2 * TILE_ROWS) {
      float* const at = target + (long long)n * DIM + d;
      tile_load<0>(at, row_bytes);
      tile_load<1>(at + TILE_ROWS, row_bytes);
      tile_load<2>(at + TILE_ROWS * DIM, row_bytes);
      tile_load<3>(at + TILE_ROWS * DIM + TILE_ROWS, row_bytes);
#pragma GCC unroll 4
      for (int lane = 0; lane < LANES; lane += TILE_DEPTH) {
        tile_load<4>(left + n * LANES + lane, left_bytes);
        tile_load<6>(right + lane / 2 * DIM + d, row_bytes);
        tile_multiply<0, 4, 6>();
        tile_load<7>(right + lane / 2 * DIM + d + TILE_ROWS, row_bytes);
        tile_multiply<1, 4, 7>();
        tile_load<5>(left + (n + TILE_ROWS) * LANES + lane, left_bytes);
        tile_multiply<2, 5, 6>();
        tile_multiply<3, 5, 7>();
      }
      tile_store<0>(at, row_bytes);
      tile_store<1>(at + TILE_ROWS, row_bytes);
      tile_store<2>(at + TILE_ROWS * DIM, row_bytes);
      tile_store<3>(at + TILE_ROWS * DIM + TILE_ROWS, row_bytes);
    }
  }
}

}  // namespace fg
