// The instructions that only a backward needs, one wrapper each: rows copied and added in bulk, transposed matrices, sums in L2. Section numbers: PTX ISA 9.0.
#pragma once
#include "fg/sm90/ptx.cuh"

namespace fg {

// Four 8x8 matrices as store_matrices takes them, each transposed (9.7.15.4).
FG_FN void store_matrices_transposed(unsigned address, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}

// cp.async.bulk (9.7.9.25.4): neighbouring bytes, a multiple of 16 and aligned to as many, to shared memory.
FG_FN void bulk_load(void* to, const void* from, unsigned bytes, Barrier& arrival) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)), "l"(from), "r"(bytes),
               "r"(shared_address(&arrival))
               : "memory");
}
// cp.reduce.async.bulk (9.7.9.25.5): float32 values of shared memory added to as many in L2; one of a group as tma_store_commit closes it.
FG_FN void bulk_add(float* to, const float* from, unsigned bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}
// cp.async.bulk (9.7.9.25.4): the same, stored.
FG_FN void bulk_store(void* to, const void* from, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}
FG_FN void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }  // then others see what was stored
template <int PENDING> FG_FN void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory"); }

// red.global.add (9.7.13.14): four neighbours in L2, 16 bytes aligned, without an answer.
FG_FN void reduce_add_4(float* address, float x0, float x1, float x2, float x3) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(x0), "f"(x1), "f"(x2), "f"(x3) : "memory");
}

FG_FN unsigned shared_pair(unsigned address) {  // two 16-bit values that others have written
  unsigned x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

// What other SMs have written during this kernel: not from this one's L1 (9.7.9.8).
FG_FN float4 load_l2(const float4* p) {
  float4 x;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(p) : "memory");
  return x;
}

// Between ordinary accesses to global memory and what bulk operations then read or add there: these are another proxy (9.7.13.4).
FG_FN void async_proxy_fence_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// A count in L2 of those who have had their turn at something: one thread waits for as many as come before it, has its turn, and lets the next one in. What it writes
// then by bulk operations comes after what the others wrote.
FG_FN void wait_turn(const int* count, int turn) {
  int now;
  do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(count) : "memory");
  while (now != turn);
  async_proxy_fence_global();
}
FG_FN void end_turn(int* count) { asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(count) : "memory"); }

}  // namespace fg
