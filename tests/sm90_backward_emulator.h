// What the sm90 backward needs beyond sm90_emulator.h: stands in for fg/sm90/backward.cuh and part/wgmma_backward.
#pragma once
#include "sm90_emulator.h"
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int __syncthreads_or(bool x) {
  static int any[2];
  static long calls;
  __syncthreads();
  if (threadIdx.x == 0) any[++calls & 1] = 0;
  __syncthreads();
  if (x) any[calls & 1] = 1;
  __syncthreads();
  return any[calls & 1];
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned atomicOr(unsigned* p, unsigned x) { const unsigned old = *p; *p |= x; return old; }
inline float atomicAdd(float* p, float x) { const float old = *p; *p += x; return old; }
inline double atomicAdd(double* p, double x) { const double old = *p; *p += x; return old; }
inline unsigned long long atomicAdd(unsigned long long* p, unsigned long long x) { const unsigned long long old = *p; *p += x; return old; }
inline unsigned __activemask() { return 0; }  // lanes that did not come are not known here: no meeting of a warp
inline unsigned __match_all_sync(unsigned, unsigned long long, int*) { return 0; }

namespace fg {
inline void store_matrices_transposed(unsigned address, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
  const unsigned r[4] = {r0, r1, r2, r3};
  auto w = emu::exchange(address);
  const int lane = threadIdx.x % 32;  // has elements (row lane / 4, columns lane % 4 * 2, + 1), which become rows
  for (int i = 0; i < 4; ++i)
    for (int e = 0; e < 2; ++e) {
      const unsigned short x = (unsigned short)(r[i] >> 16 * e);
      memcpy(smem_bytes + w[8 * i + lane % 4 * 2 + e][0] + lane / 4 * 2, &x, 2);
    }
}
inline void bulk_load(void* to, const void* from, unsigned bytes, Barrier& b) {
  if ((size_t)to % 16 || (size_t)from % 16 || bytes % 16) { fprintf(stderr, "bulk copy is not aligned\n"); exit(4); }
  memcpy(to, from, bytes);
  b.phase_tx -= bytes; ++emu::progress;
  settle(b);
}
inline void bulk_store(void* to, const void* from, unsigned bytes) { memcpy(to, from, bytes); }
inline void bulk_add(float* to, const float* from, unsigned bytes) { for (unsigned i = 0; i < bytes / 4; ++i) to[i] += from[i]; }
template <int N> void bulk_wait_read() { emu::current->copies = min(emu::current->copies, N); }
inline void tma_store_wait() { emu::current->copies = 0; }
inline void wait_turn(const int* count, int turn) { while (*count != turn) emu::yield(); }  // of this block or one before it: else nothing moves any more
inline unsigned shared_pair(unsigned address) { unsigned x; memcpy(&x, smem_bytes + address, 4); return x; }
inline float4 load_l2(const float4* p) { return *p; }
inline void async_proxy_fence_global() {}
inline void blocks_arrive(int* arrived) {
  __syncthreads();
  if (threadIdx.x == 0 && ++*arrived == (int)gridDim.x) *arrived = 0;
}
inline void blocks_wait(int* arrived, int first) {
  if (threadIdx.x == 0 && *arrived < first) { fprintf(stderr, "block %d waits for one that comes after it\n", (int)blockIdx.x); exit(5); }
  blocks_arrive(arrived);
}
inline void end_turn(int* count) { ++*count; ++emu::progress; }
inline void reduce_add_4(float* to, float x0, float x1, float x2, float x3) { to[0] += x0; to[1] += x1; to[2] += x2; to[3] += x3; }
}
template <int N> void multiply_rows(float (&d)[N], unsigned long long a, unsigned long long b, int accumulate) { multiply_scores(d, a, b, accumulate); }
template <int N> void add_dk(float (&d)[N], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned long long b) { multiply_out(d, a0, a1, a2, a3, b); }
template <int N> void add_dv(float (&d)[N], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned long long b) { multiply_out(d, a0, a1, a2, a3, b); }
template <int N> void add_dq(float (&d)[N], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned long long b) { multiply_out(d, a0, a1, a2, a3, b); }
// a by rows, b with the depth down its rows
template <int N> void multiply_dq(float (&d)[N], unsigned long long a, unsigned long long b, int accumulate) {
  const emu::Operand x = emu::decode(a), y = emu::decode(b);
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
  float left[2][16];
  for (int r = 0; r < 2; ++r) for (int k = 0; k < 16; ++k) left[r][k] = emu::row_major(x, row + r * 8, k);
  for (int i = 0; i < N; i += 4) for (int e = 0; e < 2; ++e) {
    float right[16];
    for (int k = 0; k < 16; ++k) right[k] = emu::column_major(y, k, i * 2 + lane % 4 * 2 + e);
    for (int r = 0; r < 2; ++r) { float t = accumulate ? d[i + 2 * r + e] : 0.0f; for (int k = 0; k < 16; ++k) t += left[r][k] * right[k]; d[i + 2 * r + e] = t; }
  }
}
