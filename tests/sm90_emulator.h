// A block of the sm90 kernels on the host, for tests without a GPU: threads are fibers, warps and barriers are meeting points, TMA and wgmma act at once.
// Stands in for fg/sm90/ptx.cuh and part/wgmma; matrix operands are read through their descriptors and swizzles as the hardware does.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>
#include <algorithm>
#include "fg/base.h"
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
using std::max;
using std::min;
struct Dim { unsigned x; };
struct uint4 { unsigned x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emu {
struct Fiber { ucontext_t context; Dim thread; bool done; long ops; int copies; std::vector<char> stack; };  // copies: from shared memory, not waited for
inline std::vector<Fiber> fibers;
inline Fiber* current;
inline ucontext_t scheduler;
inline Dim block, grid, threads;
inline long progress;
inline void yield() { swapcontext(&current->context, &scheduler); }
inline void leave() {
  if (current->copies) { fprintf(stderr, "a thread ends before its copies have read shared memory\n"); exit(7); }
  current->done = true;
  ++progress;
}
struct Warp { unsigned words[2][32][4]; long arrived; };
inline std::vector<Warp> warps;
// every lane gives four words and sees those of all
inline unsigned (*exchange(unsigned a, unsigned b = 0, unsigned c = 0, unsigned d = 0))[4] {
  Fiber* const me = current;
  Warp& w = warps[me->thread.x / 32];
  const long n = me->ops++;
  unsigned* const mine = w.words[n & 1][me->thread.x % 32];
  mine[0] = a; mine[1] = b; mine[2] = c; mine[3] = d;
  ++w.arrived; ++progress;
  while (w.arrived < 32 * (n + 1)) yield();
  return w.words[n & 1];
}
struct Named { int count; long generation; };
inline Named named[16];
inline std::vector<bool> came[16];  // in this generation: a thread that came twice would stand for one that has not come
inline void named_arrive(int id, int n) {
  ++progress;
  if (named[id].count == 0) came[id].assign(fibers.size(), false);
  if (came[id][current->thread.x]) { fprintf(stderr, "thread %d arrives twice at barrier %d\n", (int)current->thread.x, id); exit(9); }
  came[id][current->thread.x] = true;
  if (++named[id].count == n) { named[id].count = 0; ++named[id].generation; }
}
inline void named_sync(int id, int n) { const long g = named[id].generation; named_arrive(id, n); while (named[id].generation == g) yield(); }
inline unsigned bits(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
inline float real(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
}
#define threadIdx (emu::current->thread)
#define blockIdx (emu::block)
#define gridDim (emu::grid)
#define blockDim (emu::threads)
inline int __float_as_int(float x) { return (int)emu::bits(x); }
inline int __vimax3_s32(int a, int b, int c) { return max(a, max(b, c)); }
inline unsigned __ballot_sync(unsigned, bool x) { auto w = emu::exchange(x); unsigned r = 0; for (int i = 0; i < 32; ++i) r |= w[i][0] << i; return r; }
inline bool __all_sync(unsigned m, bool x) { return __ballot_sync(m, x) == 0xffffffffu; }
inline bool __any_sync(unsigned m, bool x) { return __ballot_sync(m, x) != 0; }
inline int __shfl_sync(unsigned, int x, int lane) { return (int)emu::exchange((unsigned)x)[lane & 31][0]; }
inline int __shfl_sync(unsigned m, unsigned x, int lane) { return __shfl_sync(m, (int)x, lane); }
inline float __shfl_sync(unsigned, float x, int lane) { return emu::real(emu::exchange(emu::bits(x))[lane & 31][0]); }
inline float __shfl_xor_sync(unsigned, float x, int by) { const int l = threadIdx.x % 32; return emu::real(emu::exchange(emu::bits(x))[l ^ by][0]); }
inline unsigned __shfl_xor_sync(unsigned, unsigned x, int by) { const int l = threadIdx.x % 32; return emu::exchange(x)[l ^ by][0]; }
inline void __syncwarp() { emu::exchange(0); }
inline void __threadfence() {}
inline int __ffs(unsigned x) { return __builtin_ffs((int)x); }
inline int atomicAdd(int* p, int x) { const int old = *p; *p += x; return old; }
inline void __syncthreads() { emu::named_sync(0, (int)emu::fibers.size()); }
alignas(1024) inline char smem_bytes[232448];

namespace fg {
constexpr unsigned ALL_LANES = 0xffffffffu;
struct alignas(128) TensorMap { unsigned long long base; long long counts[5]; unsigned long long strides[4]; int box_columns, box_rows; };  // a fifth dimension of packed sequences
inline unsigned shared_address(const void* p) { return (unsigned)((const char*)p - smem_bytes); }
inline int shared_int(const int& x) { return x; }
inline bool uniform(bool x) { return __any_sync(ALL_LANES, x); }
inline void opaque(unsigned&) {}
inline void opaque(int&) {}
inline void opaque(float&) {}
inline void opaque(long long&) {}
inline void opaque(bool&) {}
struct Barrier { unsigned short count, pending; unsigned phase_tx; };  // phase in bit 31, expected bytes below
inline void settle(Barrier& b) { if (b.pending == 0 && (b.phase_tx & 0x7fffffffu) == 0) { b.pending = b.count; b.phase_tx ^= 0x80000000u; } }
inline void barrier_init(Barrier& b, unsigned n) { b.count = b.pending = (unsigned short)n; b.phase_tx = 0; }
inline void barrier_init_fence() {}
inline void barrier_arrive(Barrier& b) { if (!b.pending) { fprintf(stderr, "arrival too many\n"); exit(4); } ++emu::progress; --b.pending; settle(b); }
inline void barrier_expect(Barrier& b, unsigned bytes) { b.phase_tx += bytes; barrier_arrive(b); }
inline void barrier_wait(Barrier& b, unsigned parity) { while ((b.phase_tx >> 31) == parity) emu::yield(); }
template <int SLOTS> struct Ring {
  unsigned slot = 0, parity = 0;
  void advance() { if (++slot == SLOTS) { slot = 0; parity ^= 1; } }
};
inline void group_sync(int id, int n) { emu::named_sync(id, n); }
inline void group_arrive(int id, int n) { emu::named_arrive(id, n); }
constexpr unsigned long long READ_ONCE = 0, READ_AGAIN = 0;
inline unsigned place(unsigned address, int columns) { const int chunks = columns / 8; return address ^ (address / 128 % chunks * 16); }
// Where an element lies, as the hardware computes it: modulo 2^64; nullptr outside the tensor.
inline char* element_at(const TensorMap& m, const int (&at)[5]) {
  unsigned long long address = m.base + at[0] * 2ull;
  for (int d = 0; d < 5; ++d) {
    if (at[d] < 0 || at[d] >= m.counts[d]) return nullptr;
    if (d > 0) address += at[d] * m.strides[d - 1];
  }
  return (char*)address;
}
inline void check_box(const TensorMap& m, const int (&at)[5]) {
  for (int d = 0; d < 5; ++d)
    if (at[d] < 0 || (d > 1 && at[d] >= m.counts[d])) { fprintf(stderr, "tma outside: %d %d %d %d %d\n", at[0], at[1], at[2], at[3], at[4]); exit(4); }
}
inline void load_box(void* to, const TensorMap& m, Barrier& b, const int (&at)[5]) {
  const unsigned start = shared_address(to);
  check_box(m, at);
  for (int r = 0; r < m.box_rows; ++r)
    for (int c = 0; c < m.box_columns; ++c) {
      unsigned short x = 0;
      if (const char* from = element_at(m, {at[0] + c, at[1] + r, at[2], at[3], at[4]})) memcpy(&x, from, 2);
      memcpy(smem_bytes + place(start + (r * m.box_columns + c) * 2, m.box_columns), &x, 2);
    }
  b.phase_tx -= m.box_rows * m.box_columns * 2; ++emu::progress;
  settle(b);
}
inline void store_box(const TensorMap& m, const void* from, const int (&at)[5]) {
  const unsigned start = shared_address(from);
  for (int r = 0; r < m.box_rows; ++r)
    for (int c = 0; c < m.box_columns; ++c)
      if (char* to = element_at(m, {at[0] + c, at[1] + r, at[2], at[3], at[4]})) memcpy(to, smem_bytes + place(start + (r * m.box_columns + c) * 2, m.box_columns), 2);
}
inline void tma_load(void* to, const TensorMap& m, Barrier& b, int column, int row, int head, int batch, unsigned long long) { load_box(to, m, b, {column, row, head, batch, 0}); }
inline void tma_store(const TensorMap& m, const void* from, int column, int row, int head, int batch) { store_box(m, from, {column, row, head, batch, 0}); }
constexpr int PACKED_ROWS = 1 << 30;
struct Rows { int first, count; };
inline void tma_load(void* to, const TensorMap& m, Barrier& b, int column, int row, int head, Rows of, unsigned long long) {
  load_box(to, m, b, {column, PACKED_ROWS - of.count + row, head, of.first + of.count, PACKED_ROWS});
}
inline void tma_store(const TensorMap& m, const void* from, int column, int row, int head, Rows of) {
  store_box(m, from, {column, PACKED_ROWS - of.count + row, head, of.first + of.count, PACKED_ROWS});
}
inline void tma_store_commit() { ++emu::current->copies; }
inline void tma_store_wait_read() { emu::current->copies = 0; }
inline void async_proxy_fence() {}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int N> void wgmma_wait() {}
template <int N> void keep(float (&)[N]) {}
template <int N> void registers_raise() {}
template <int N> void registers_lower() {}
inline void store_matrices(unsigned address, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
  const unsigned r[4] = {r0, r1, r2, r3};
  auto w = emu::exchange(address);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) memcpy(smem_bytes + w[8 * i + lane / 4][0] + lane % 4 * 4, &r[i], 4);
}
template <class S> unsigned pack(float low, float high) { const S a = from_real<S>(low), b = from_real<S>(high); return a.bits | (unsigned)b.bits << 16; }
inline uint4 quad_transpose(unsigned x0, unsigned x1, unsigned x2, unsigned x3, int lane) {
  auto w = emu::exchange(x0, x1, x2, x3);
  const int q = lane / 4 * 4, c = lane % 4;
  return {w[q][c], w[q + 1][c], w[q + 2][c], w[q + 3][c]};
}
inline unsigned low_bits(int n) { return n <= 0 ? 0 : n >= 32 ? ~0u : (1u << n) - 1; }
inline float quad_max(float x) { x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1)); return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2)); }
inline float quad_sum(float x) { x += __shfl_xor_sync(ALL_LANES, x, 1); return x + __shfl_xor_sync(ALL_LANES, x, 2); }
inline float warp_sum(float x) { for (int i = 16; i; i >>= 1) x += __shfl_xor_sync(ALL_LANES, x, i); return x; }
inline float approximate_exp2(float x) { return exp2f(x); }
inline float approximate_log2(float x) { return log2f(x); }
inline float approximate_inverse(float x) { return 1.0f / x; }
inline float smem_real(unsigned byte, int columns, const float* table) { unsigned short x; memcpy(&x, smem_bytes + place(byte, columns), 2); return table[x]; }
}
// matrix operands through descriptors, as the hardware reads them
namespace emu {
inline float table[65536];
struct Operand { unsigned start, leading, stride; int columns; };
inline Operand decode(unsigned long long d) { const int swizzle = (int)(d >> 62); return {(unsigned)(d & 0x3fff) << 4, (unsigned)(d >> 16 & 0x3fff) << 4, (unsigned)(d >> 32 & 0x3fff) << 4, swizzle == 1 ? 64 : swizzle == 2 ? 32 : 16}; }
inline float row_major(const Operand& o, int row, int k) { return fg::smem_real(o.start + row / 8 * o.stride + row % 8 * o.columns * 2 + k * 2, o.columns, table); }
inline float column_major(const Operand& o, int k, int n) { return fg::smem_real(o.start + n / o.columns * o.leading + k / 8 * o.stride + k % 8 * o.columns * 2 + n % o.columns * 2, o.columns, table); }
}
template <int N> void multiply_scores(float (&d)[N], unsigned long long a, unsigned long long b, int accumulate) {
  const emu::Operand x = emu::decode(a), y = emu::decode(b);
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
  float left[2][16];
  for (int r = 0; r < 2; ++r) for (int k = 0; k < 16; ++k) left[r][k] = emu::row_major(x, row + r * 8, k);
  for (int i = 0; i < N; i += 4) for (int e = 0; e < 2; ++e) {
    float right[16];
    for (int k = 0; k < 16; ++k) right[k] = emu::row_major(y, i * 2 + lane % 4 * 2 + e, k);
    for (int r = 0; r < 2; ++r) { float t = accumulate ? d[i + 2 * r + e] : 0.0f; for (int k = 0; k < 16; ++k) t += left[r][k] * right[k]; d[i + 2 * r + e] = t; }
  }
}
template <int N> void multiply_out(float (&d)[N], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned long long b) {
  const emu::Operand y = emu::decode(b);
  auto w = emu::exchange(a0, a1, a2, a3);
  const int lane = threadIdx.x % 32;
  float left[2][16];
  for (int r = 0; r < 2; ++r) for (int k = 0; k < 16; ++k) { const unsigned u = w[lane / 4 * 4 + k % 8 / 2][r + k / 8 * 2]; left[r][k] = emu::table[k % 2 ? u >> 16 : u & 0xffff]; }
  for (int i = 0; i < N; i += 4) for (int e = 0; e < 2; ++e) {
    float right[16];
    for (int k = 0; k < 16; ++k) right[k] = emu::column_major(y, k, i * 2 + lane % 4 * 2 + e);
    for (int r = 0; r < 2; ++r) for (int k = 0; k < 16; ++k) d[i + 2 * r + e] += left[r][k] * right[k];
  }
}
template <class Body> void run_grid(int blocks, int threads, Body body) {
  using namespace emu;
  for (int i = 0; i < 65536; ++i) table[i] = fg::to_real(T{(unsigned short)i});
  grid.x = blocks; emu::threads.x = threads;
  static Body* now; now = &body;
  for (int n = 0; n < blocks; ++n) {
    block.x = n;
    fibers.assign(threads, Fiber{}); warps.assign(threads / 32, Warp{}); memset(named, 0, sizeof named);
    memset(smem_bytes, 0xff, sizeof smem_bytes);
    for (int t = 0; t < threads; ++t) {
      Fiber& f = fibers[t];
      f.thread.x = t; f.stack.resize(65536 * 2); getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack.data(); f.context.uc_stack.ss_size = f.stack.size(); f.context.uc_link = &scheduler;
      makecontext(&f.context, (void (*)())+[]() { (*now)(); leave(); }, 0);
    }
    // Warps take turns in an order of chance, in which half of them stay behind: what only holds in some order shows.
    static unsigned long long seed = 1;
    auto chance = [&](int below) { seed = seed * 6364136223846793005ull + 1442695040888963407ull; return (int)(seed >> 33) % below; };
    std::vector<int> order(threads / 32);
    for (int w = 0; w < threads / 32; ++w) order[w] = w;
    long last = -1, idle = 0;
    for (bool left = true; left;) {
      left = false;
      idle = progress == last ? idle + 1 : 0;
      if (idle > 2000) { fprintf(stderr, "deadlock in block %d\n", n); for (int t = 0; t < threads; t += 32) fprintf(stderr, "%d", fibers[t].done); exit(3); }
      last = progress;
      for (int w = threads / 32 - 1; w > 0; --w) { const int other = chance(w + 1), kept = order[w]; order[w] = order[other]; order[other] = kept; }
      for (int w : order) {
        const bool stays = chance(2);
        for (int t = w * 32; t < w * 32 + 32; ++t) if (!fibers[t].done) {
          if (!stays) { current = &fibers[t]; swapcontext(&scheduler, &fibers[t].context); }
          left |= !fibers[t].done;
        }
      }
    }
  }
}
