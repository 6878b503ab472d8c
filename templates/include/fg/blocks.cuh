// Blocks of one launch that wait for earlier ones of it. Each arrives once, and the last one leaves 0 to the next launch: nobody waits any more. Blocks start in the
// order of their indices, so that none waits for one that has no place to run.
#pragma once
#include "fg/base.h"

namespace fg {

FG_FN void arrive(int* arrived) {
  if (atomicAdd(arrived, 1) == (int)gridDim.x - 1) *arrived = 0;
}
// By all threads of a block that others wait for: what they wrote comes before it, through the barrier and one thread's fence.
FG_FN void blocks_arrive(int* arrived) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    arrive(arrived);
  }
}
// The same by one thread, after a barrier of all of the block, where a later block waits for it: then it is not the last.
FG_FN void arrive_before_the_last(int* arrived) {
  __threadfence();
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(arrived) : "memory");
}
// By one thread, until `first` blocks have arrived: ld.acquire (PTX ISA 9.0, 9.7.9.8).
FG_FN void await_arrivals(const int* arrived, int first) {
  int now;
  do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(arrived) : "memory");
  while (now < first);
}
// By all threads of a block that waits until `first` have arrived, and arrives itself later: they then see what those wrote, through one thread and the barrier.
FG_FN void blocks_await(const int* arrived, int first) {
  if (threadIdx.x == 0) await_arrivals(arrived, first);
  __syncthreads();
}
// The same for a block that nobody waits for: it arrives at once.
FG_FN void blocks_wait(int* arrived, int first) {
  if (threadIdx.x == 0) {
    await_arrivals(arrived, first);
    arrive(arrived);
  }
  __syncthreads();
}

}  // namespace fg
