// Vectors of `real` as wide as the registers this file is compiled for, in the vector extension of GCC and clang.
// Comes after part/config, which defines `real`. Lane i of a vector belongs to query row i of a tile wherever a kernel does not say otherwise.
#pragma once
#include "fg/base.h"

#include <utility>

#if defined(__AVX512F__)
#if !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")  // loops over hooks too: tuning for some of these processors prefers half of a register
#endif
#define FG_VECTOR_BYTES 64
#define FG_VECTOR_REGISTERS 32
#elif defined(__AVX2__)
#define FG_VECTOR_BYTES 32
#define FG_VECTOR_REGISTERS 16
#else
#define FG_VECTOR_BYTES 16
#if defined(__aarch64__)
#define FG_VECTOR_REGISTERS 32
#else
#define FG_VECTOR_REGISTERS 16
#endif
#endif

namespace fg {

typedef real vec __attribute__((vector_size(FG_VECTOR_BYTES), may_alias));
typedef real vec_unaligned __attribute__((vector_size(FG_VECTOR_BYTES), may_alias, aligned(sizeof(real))));
constexpr int WIDTH = FG_VECTOR_BYTES / (int)sizeof(real);
constexpr bool SINGLE = sizeof(real) == 4;

FG_FN vec load(const real* p) { return *(const vec*)p; }
FG_FN void store(real* p, vec x) { *(vec*)p = x; }
FG_FN vec broadcast(real x) { return vec{} + x; }
FG_FN vec larger(vec a, vec b) { return a > b ? a : b; }  // b where a is NaN

// Lane l of the result: a[l] where bit STEP of l is 0, else b[l - STEP] (HIGH: a[l + STEP], else b[l]).
template <int STEP, bool HIGH, int... L>
FG_FN vec exchange(vec a, vec b, std::integer_sequence<int, L...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (L & STEP ? WIDTH + L - (HIGH ? 0 : STEP) : L + (HIGH ? STEP : 0))...);
#else
  typedef decltype(vec{} < vec{}) ints;
  return __builtin_shuffle(a, b, ints{(L & STEP ? WIDTH + L - (HIGH ? 0 : STEP) : L + (HIGH ? STEP : 0))...});
#endif
}

// A block of WIDTH vectors becomes its transpose, by exchanging ever larger squares across the diagonal.
template <int STEP = 1>
FG_FN void transpose_block(vec (&x)[WIDTH]) {
  if constexpr (STEP < WIDTH) {
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; ++i) {
      if (i & STEP) continue;
      const vec a = x[i], b = x[i + STEP];
      x[i] = exchange<STEP, false>(a, b, std::make_integer_sequence<int, WIDTH>());
      x[i + STEP] = exchange<STEP, true>(a, b, std::make_integer_sequence<int, WIDTH>());
    }
    transpose_block<STEP * 2>(x);
  }
}

// 2^x for the softmax: relative error below 1.2 ulp, 0 for -inf and wherever the result would be subnormal, NaN for NaN.
// x = n + r with n integer and |r| <= 1/2; a polynomial in r; n goes into the exponent.
FG_FN vec exp2_polynomial(vec r) {
  if constexpr (SINGLE) {
    vec p = r * real(1.326472731307149e-3) + real(9.671512991189957e-3);
    p = p * r + real(5.550733581185341e-2);
    p = p * r + real(2.4022242426872253e-1);
    p = p * r + real(6.931470036506653e-1);
    return p * r + real(1);
  } else {
    vec p = r * real(4.454960598186518394e-10) + real(7.0725859692492237e-9);
    p = p * r + real(1.017806244584577352e-7);
    p = p * r + real(1.321544258792168965e-6);
    p = p * r + real(1.525273382983611839e-5);
    p = p * r + real(1.540353044173605015e-4);
    p = p * r + real(1.333355814641693531e-3);
    p = p * r + real(9.618129107606888527e-3);
    p = p * r + real(5.550410866482159434e-2);
    p = p * r + real(2.402265069591009822e-1);
    p = p * r + real(6.931471805599453094e-1);
    return p * r + real(1);
  }
}

#if defined(__AVX512DQ__)
FG_FN vec exp2(vec x) {
  // vreduceps (imm 8: nearest even, quiet): x - rint(x), 0 for an infinite x. vscalefps: p * 2^floor(n), 0 for n = -inf.
  // Intel SDM volume 2, VREDUCEPS and VSCALEFPS. Subnormal results are flushed by the caller's FlushSubnormals.
  vec r, result;
  if constexpr (SINGLE) {
    asm("vreduceps $8, %1, %0" : "=v"(r) : "v"(x));
    asm("vscalefps %2, %1, %0" : "=v"(result) : "v"(exp2_polynomial(r)), "v"(x - r));
  } else {
    asm("vreducepd $8, %1, %0" : "=v"(r) : "v"(x));
    asm("vscalefpd %2, %1, %0" : "=v"(result) : "v"(exp2_polynomial(r)), "v"(x - r));
  }
  return result;
}
#else
FG_FN vec exp2(vec x) {
  // Adding 1.5 * 2^(mantissa bits) rounds to an integer and leaves it in the low bits.
  if constexpr (SINGLE) {
    typedef int ints __attribute__((vector_size(FG_VECTOR_BYTES)));
    const vec top = x < real(128) ? x : (x != x ? x : broadcast(128));
    const vec shifted = top + real(12582912), r = top - (shifted - real(12582912));
    const vec p = (vec)((ints)exp2_polynomial(r) + ((ints)shifted << 23));
    return x < real(-126) ? vec{} : p;
  } else {
    typedef long long ints __attribute__((vector_size(FG_VECTOR_BYTES)));
    const vec top = x < real(1024) ? x : (x != x ? x : broadcast(1024));
    const vec shifted = top + real(6755399441055744), r = top - (shifted - real(6755399441055744));
    const vec p = (vec)((ints)exp2_polynomial(r) + ((ints)shifted << 52));
    return x < real(-1022) ? vec{} : p;
  }
}
#endif

#if defined(__AVX512DQ__)
// The same with a relative error of 9e-5, for weights that are rounded to bfloat16: x = floor(x) + r, a cubic on [0, 1) and no rounding of x of its own
// (imm 9: toward minus infinity, quiet). Float only.
FG_FN vec exp2_coarse(vec x) {
  vec r, result;
  asm("vreduceps $9, %1, %0" : "=v"(r) : "v"(x));
  vec p = r * real(7.706703990697861e-2) + real(2.2764499485492706e-1);
  p = p * r + real(6.951167583465576e-1);
  p = p * r + real(1);
  asm("vscalefps %2, %1, %0" : "=v"(result) : "v"(p), "v"(x));
  return result;
}
// The larger magnitude of two floats, the other's where one is NaN (vrangeps, imm 11: the larger absolute value, without a sign; Intel SDM volume 2).
FG_FN vec larger_magnitude(vec a, vec b) {
  vec result;
  asm("vrangeps $11, %2, %1, %0" : "=v"(result) : "v"(a), "v"(b));
  return result;
}
FG_FN bool any_not_within(vec a, vec b) {  // a > b in some lane, or a NaN there
  unsigned short lanes;
  asm("vcmpps $22, %2, %1, %0" : "=k"(lanes) : "v"(a), "v"(b));
  return lanes != 0;
}
FG_FN bool any_greater(vec a, vec b) {
  unsigned short lanes;
  asm("vcmpps $14, %2, %1, %0" : "=k"(lanes) : "v"(a), "v"(b));
  return lanes != 0;
}
#endif

// While one lives, this thread treats subnormal numbers as zero: a weight of 1e-40 would slow every multiply-add that reads it a hundredfold.
struct FlushSubnormals {
#if defined(__SSE2__)
  unsigned saved;
  FlushSubnormals() : saved(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(saved | 0x8040u); }  // flush to zero, subnormals are zeros
  ~FlushSubnormals() { __builtin_ia32_ldmxcsr(saved); }
#endif
};

}  // namespace fg
