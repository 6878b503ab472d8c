// The PTX instructions of the sm_80 family, one wrapper each (section numbers: PTX ISA 9.0). Needs only fg/base.h.
#pragma once
#include "fg/base.h"

namespace fg {

constexpr unsigned ALL_LANES = 0xffffffffu;

// mad.lo.s64 (9.7.1.4). As an instruction of its own it keeps the compiler from adding the last term, a thread's own, to the base address that all threads share,
// which would then take registers of every thread over a whole loop.
FG_FN long long multiply_add(long long a, long long b, long long c) {
  long long d;
  asm("mad.lo.s64 %0, %1, %2, %3;" : "=l"(d) : "l"(a), "l"(b), "l"(c));
  return d;
}

// Address of shared memory as the 32-bit number that cp.async and ldmatrix take (section 5.3, state spaces).
FG_FN unsigned shared_address(const void* pointer) { return (unsigned)__cvta_generic_to_shared(pointer); }

// cp.async (9.7.9.25.3.1): 16 bytes from global to shared memory past the registers and L1. Of them the first `bytes` (0..16) are read, the rest become zero;
// with 0 nothing is read.
FG_FN void copy_async_16(unsigned shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
// The 4-byte form goes through L1.
FG_FN void copy_async_4(unsigned shared, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
FG_FN void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most PENDING of this thread's latest groups are still under way. Other threads' copies need a barrier after it.
template <int PENDING> FG_FN void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// ldmatrix (9.7.14.5.15): four 8x8 matrices of 16-bit elements; lane l supplies the address of row l % 8 of matrix l / 8. Register i of lane l gets elements
// (l / 4, 2 (l % 4)) and the next of matrix i, transposed by `.trans` first.
FG_FN void load_matrices(unsigned (&r)[4], unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared));
}
FG_FN void load_matrices_transposed(unsigned (&r)[4], unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared));
}

// st.shared (9.7.9.11): one register to shared memory.
FG_FN void store_shared(unsigned shared, unsigned value) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(value) : "memory"); }

// mma.sync m16n8k16 (9.7.14.5.8), float32 accumulation: d += a b. With g = lane / 4 and c = lane % 4, a: rows g and g + 8 (registers 0, 1) of columns 2c, 2c + 1,
// then of columns 2c + 8, 2c + 9; b: rows 2c, 2c + 1 and 2c + 8, 2c + 9 of column g; d: columns 2c, 2c + 1 of row g, then of row g + 8.
template <class T> FG_FN void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
template <> FG_FN void mma<bf16>(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> FG_FN void mma<f16>(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// cvt (9.7.9.21): two floats to one register of two 16-bit values, to nearest even; the instruction's first source is the upper half.
template <class T> FG_FN unsigned pack(float low, float high);
template <> FG_FN unsigned pack<bf16>(float low, float high) {
  unsigned r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
template <> FG_FN unsigned pack<f16>(float low, float high) {
  unsigned r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// ex2.approx, lg2.approx (9.7.3.23, 9.7.3.22): one special-function operation; relative error 2^-22, subnormal results become 0.
FG_FN float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FG_FN float log2_fast(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// red.global.add (9.7.13.14): a float32 addition in L2 without an answer; from sm_90 on four neighbours at once (16 bytes aligned).
FG_FN void reduce_add(float* address, float x) { asm volatile("red.global.add.f32 [%0], %1;" ::"l"(address), "f"(x) : "memory"); }
#if __CUDA_ARCH__ >= 900
FG_FN void reduce_add_4(float* address, const float (&x)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}
#endif

// redux.sync (9.7.13.9): a number that all 32 lanes hold alike, in one of the warp's uniform registers, which saves one in every thread. Divisions, shuffles and loads
// leave their results in the threads' registers.
FG_FN int same_in_warp(int x) {
  int y;
  asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}

FG_FN float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
  return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}
FG_FN float quad_sum(float x) {
  x += __shfl_xor_sync(ALL_LANES, x, 1);
  return x + __shfl_xor_sync(ALL_LANES, x, 2);
}
FG_FN float warp_sum(float x) {
  for (int i = 16; i; i >>= 1) x += __shfl_xor_sync(ALL_LANES, x, i);
  return x;
}

}  // namespace fg
