// Hopper instructions for the kernels of 16-bit types, one wrapper each. Section numbers: PTX ISA 9.0. wgmma itself is printed by part/wgmma.j2.
#pragma once
#include "fg/base.h"

namespace fg {

constexpr unsigned ALL_LANES = 0xffffffffu;

// A tensor map as cuTensorMapEncodeTiled writes it; kernels take it by value in constant memory.
struct alignas(128) TensorMap { unsigned long long words[16]; };

FG_FN unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// A value that another warp may have written since it was last read.
FG_FN int shared_int(const int& x) {
  int y;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(y) : "r"(shared_address(&x)) : "memory");
  return y;
}

// A condition that is the same in all lanes, which the compiler is told by this: what a loop changes stays in uniform registers, and wgmma's descriptors with it, only
// if the loop and all around it end for all lanes at once. NVRTC 13.0 does not see that of conditions read from shared memory, and a step costs 70-110 moves more.
FG_FN bool uniform(bool x) { return __any_sync(ALL_LANES, x); }

// Hides where a value comes from.
FG_FN void opaque(unsigned& x) { asm volatile("" : "+r"(x)); }
FG_FN void opaque(float& x) { asm volatile("" : "+f"(x)); }
FG_FN void opaque(int& x) { asm volatile("" : "+r"(x)); }
FG_FN void opaque(long long& x) { asm volatile("" : "+l"(x)); }
FG_FN void opaque(bool& x) {
  int word = x;
  opaque(word);
  x = word != 0;
}

// ---- mbarrier (9.7.13.15). A phase ends when `count` arrivals and the expected bytes have come; waiting for parity p returns once the phase of that parity is over.
// A fresh barrier is in phase 0: waiting for parity 1 returns at once.

using Barrier = unsigned long long;

FG_FN void barrier_init(Barrier& b, unsigned count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&b)), "r"(count) : "memory"); }
FG_FN void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
FG_FN void barrier_arrive(Barrier& b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&b)) : "memory"); }
// One arrival that also announces `bytes` of TMA loads.
FG_FN void barrier_expect(Barrier& b, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&b)), "r"(bytes) : "memory");
}
FG_FN void barrier_wait(Barrier& b, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(shared_address(&b)),
      "r"(parity)
      : "memory");
}

// A ring's position: its slot, and the parity that flips with every round.
template <int SLOTS> struct Ring {
  unsigned slot = 0, parity = 0;
  FG_FN void advance() {
    if (++slot == SLOTS) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// ---- named barriers (9.7.13.1) among `threads` threads; id 0 is __syncthreads too

FG_FN void group_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
FG_FN void group_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// ---- TMA (9.7.9.27): boxes of a tensor map with coordinates (column, row, head, batch)

// L2 policies as createpolicy makes them: rows that one block reads, and keys and values that the blocks of a head share.
constexpr unsigned long long READ_ONCE = 0x12f0000000000000ull, READ_AGAIN = 0x14f0000000000000ull;

FG_FN void tma_load(void* to, const TensorMap& map, Barrier& arrival, int column, int row, int head, int batch, unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&arrival)), "r"(column), "r"(row), "r"(head), "r"(batch), "l"(policy)
      : "memory");
}
FG_FN void tma_store(const TensorMap& map, const void* from, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map), "r"(shared_address(from)), "r"(column), "r"(row),
               "r"(head), "r"(batch)
               : "memory");
}

// Packed sequences, where a box must end with its sequence: what lies past it is the next one's, to be read as zeros and not to be written. In their maps the row is
// counted so that a sequence's last one is the dimension's last, PACKED_ROWS - 1; two more dimensions, of a row and of 2^34 bytes less a row, make up for that:
// address = base + (PACKED_ROWS - count + row) * stride + (first + count) * stride + PACKED_ROWS * (2^34 - stride), modulo 2^64 that of row first + row.
constexpr int PACKED_ROWS = 1 << 30;
struct Rows { int first, count; };  // of a sequence within the packed tensor

FG_FN void tma_load(void* to, const TensorMap& map, Barrier& arrival, int column, int row, int head, Rows of, unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&arrival)), "r"(column), "r"(PACKED_ROWS - of.count + row), "r"(head), "r"(of.first + of.count), "r"(PACKED_ROWS), "l"(policy)
      : "memory");
}
FG_FN void tma_store(const TensorMap& map, const void* from, int column, int row, int head, Rows of) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map), "r"(shared_address(from)), "r"(column),
               "r"(PACKED_ROWS - of.count + row), "r"(head), "r"(of.first + of.count), "r"(PACKED_ROWS)
               : "memory");
}
FG_FN void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
FG_FN void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }  // then the source may be overwritten
FG_FN void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }      // ordinary stores before what TMA and wgmma read

// ---- wgmma's bookkeeping (9.7.15.7)

FG_FN void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FG_FN void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> FG_FN void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }
// Keeps accumulators in their registers while wgmma works on them behind the compiler's back.
template <int COUNT> FG_FN void keep(float (&registers)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// ---- registers of a warpgroup (9.7.19.5); the block's sum must not exceed what it was launched with, or the increase waits for ever

template <int COUNT> FG_FN void registers_raise() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> FG_FN void registers_lower() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// ---- four 8x8 matrices of 16-bit values, register i of all lanes to the matrix whose row addresses lanes 8 i .. 8 i + 7 give (9.7.15.4)

FG_FN void store_matrices(unsigned address, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}

// ---- arithmetic

// The n low bits, n clamped to 0 .. 32 (9.7.8.9: a shift by 32 gives 0).
FG_FN unsigned low_bits(int n) { unsigned r; asm("shr.u32 %0, %1, %2;" : "=r"(r) : "r"(ALL_LANES), "r"(32 - min(max(n, 0), 32))); return r; }

// Two values in one register, the first in the lower half (9.7.9.21); the instruction names the upper half first.
template <class S> FG_FN unsigned pack(float low, float high);
template <> FG_FN unsigned pack<bf16>(float low, float high) { unsigned r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
template <> FG_FN unsigned pack<f16>(float low, float high) { unsigned r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }

// Lane c of a quad gives x_j, columns 2 c and 2 c + 1 of block j; it gets back the eight columns of block c.
FG_FN uint4 quad_transpose(unsigned x0, unsigned x1, unsigned x2, unsigned x3, int lane) {
  const bool high = lane & 2, odd = lane & 1;
  const unsigned a0 = __shfl_xor_sync(ALL_LANES, high ? x0 : x2, 2), a1 = __shfl_xor_sync(ALL_LANES, high ? x1 : x3, 2);
  const unsigned y0 = high ? a0 : x0, y1 = high ? a1 : x1, y2 = high ? x2 : a0, y3 = high ? x3 : a1;  // y0, y1 from lane c & 1; y2, y3 from lane 2 + (c & 1)
  const unsigned b0 = __shfl_xor_sync(ALL_LANES, odd ? y0 : y1, 1), b1 = __shfl_xor_sync(ALL_LANES, odd ? y2 : y3, 1);
  return odd ? make_uint4(b0, y1, b1, y3) : make_uint4(y0, b0, y2, b1);
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
