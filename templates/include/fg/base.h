// Types and small helpers shared by every emitted kernel, host and device. Header-less: NVRTC brings none of its own.
#pragma once

#if defined(__CUDACC_RTC__) || defined(__CUDACC__)
#define FG_HOST 0
#define FG_FN __device__ __forceinline__
#else
#define FG_HOST 1
#define FG_FN static inline __attribute__((always_inline))
#include <cstring>
#endif

namespace fg {

struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };

constexpr int EMPTY = 0, PARTIAL = 1, FULL = 2;  // classes of a q-tile x kv-tile under the mask
constexpr double LOG2E = 1.4426950408889634074, LN2 = 0.69314718055994530942;

struct Range { int begin, end; };  // half-open

FG_FN float bits_to_float(unsigned u) {
#if FG_HOST
  float f; memcpy(&f, &u, 4); return f;
#else
  return __uint_as_float(u);
#endif
}
FG_FN unsigned float_to_bits(float f) {
#if FG_HOST
  unsigned u; memcpy(&u, &f, 4); return u;
#else
  return __float_as_uint(f);
#endif
}

template <class R> FG_FN R infinity() { return R(bits_to_float(0x7f800000u)); }
template <class R> FG_FN R not_a_number() { return R(bits_to_float(0x7fc00000u)); }

FG_FN float to_real(float x) { return x; }
FG_FN double to_real(double x) { return x; }
FG_FN float to_real(bf16 x) { return bits_to_float((unsigned)x.bits << 16); }
FG_FN float to_real(f16 x) {
#if FG_HOST
  // no step touches a subnormal float, so that kernels may flush those: a subnormal half is the difference of two normal numbers
  const unsigned h = x.bits, magnitude = (h & 0x7fffu) << 13;
  const unsigned normal = magnitude + (112u << 23);
  const unsigned subnormal = float_to_bits(bits_to_float(magnitude + (113u << 23)) - bits_to_float(113u << 23));
  const unsigned special = 0x7f800000u | magnitude;
  unsigned bits = (h & 0x7c00u) == 0 ? subnormal : normal;
  bits = (h & 0x7c00u) == 0x7c00u ? special : bits;
  return bits_to_float(bits | (h & 0x8000u) << 16);
#else
  float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x.bits)); return f;
#endif
}

FG_FN void round_to(float& y, float x) { y = x; }
FG_FN void round_to(double& y, double x) { y = x; }
FG_FN void round_to(float& y, double x) { y = (float)x; }
FG_FN void round_to(bf16& y, float x) {
#if FG_HOST
  const unsigned u = float_to_bits(x);
  const unsigned rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;  // to nearest even
  const unsigned quiet = (u >> 16) | 0x40u;
  y.bits = (unsigned short)((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#endif
}
FG_FN void round_to(f16& y, float x) {
#if FG_HOST
  const unsigned u = float_to_bits(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  // normal results: rebias and round to nearest even; subnormal ones: let the float adder round at the right place
  const unsigned normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
  const unsigned subnormal = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u;
  unsigned r = magnitude < 0x38800000u ? subnormal : normal;
  r = magnitude >= 0x477ff000u ? 0x7c00u : r;
  r = magnitude > 0x7f800000u ? 0x7e00u : r;
  y.bits = (unsigned short)(r | sign);
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#endif
}
template <class T, class R> FG_FN T from_real(R x) {  // to nearest even
  T y;
  round_to(y, x);
  return y;
}

// a product that rounds on its own: compilers may otherwise fuse it with a sum, which moves a comparison by an ulp
FG_FN float product(float a, float b) {
#if FG_HOST
  float r = a * b;
  asm("" : "+g"(r));
  return r;
#else
  return __fmul_rn(a, b);
#endif
}
FG_FN double product(double a, double b) {
#if FG_HOST
  double r = a * b;
  asm("" : "+g"(r));
  return r;
#else
  return __dmul_rn(a, b);
#endif
}

FG_FN int wrapping_neg(int a) { return (int)(0u - (unsigned)a); }
FG_FN long long wrapping_neg(long long a) { return (long long)(0ull - (unsigned long long)a); }

// floored division and modulus, as in Python; a zero divisor (an element that nobody sees) gives 0 instead of a trap, and so does the least
// integer by -1, whose quotient wraps around
template <class I> FG_FN I floordiv(I a, I b) {
  if (b == 0) return 0;
  if (b == -1) return wrapping_neg(a);
  const I q = a / b;
  return q - I((a % b != 0) & ((a < 0) != (b < 0)));
}
template <class I> FG_FN I floormod(I a, I b) {
  if (b == 0 || b == -1) return 0;
  const I r = a % b;
  return r + ((r != 0) & ((r < 0) != (b < 0)) ? b : I(0));
}
template <class I> FG_FN I truncdiv(I a, I b) { return b == 0 ? I(0) : b == -1 ? wrapping_neg(a) : a / b; }

// shifts by any number of places, as in torch: what is shifted out is gone; negative counts are large ones
FG_FN int shift_left(int a, int n) { return (unsigned)n < 32u ? (int)((unsigned)a << (n & 31)) : 0; }
FG_FN long long shift_left(long long a, long long n) { return (unsigned long long)n < 64ull ? (long long)((unsigned long long)a << (n & 63)) : 0; }
FG_FN int shift_right(int a, int n) { return a >> ((unsigned)n < 32u ? n & 31 : 31); }
FG_FN long long shift_right(long long a, long long n) { return a >> ((unsigned long long)n < 64ull ? n & 63 : 63); }

template <class I> FG_FN I int_min(I a, I b) { return b < a ? b : a; }
template <class I> FG_FN I int_max(I a, I b) { return a < b ? b : a; }
template <class I> FG_FN I int_abs(I a) { return a < 0 ? -a : a; }

// an index outside a captured tensor (an element that nobody sees) reads its nearest entry
// base[index * stride]
template <class C> FG_FN C element(const C* base, int index, int stride) {
#if FG_HOST
  return stride == 1 ? base[index] : base[(long long)index * stride];  // compilers make a loop of its own of each, the first without products
#else
  // bytes from the base: one multiply-add on 64 bits
  return *reinterpret_cast<const C*>(reinterpret_cast<const char*>(base) + (long long)index * (stride * (int)sizeof(C)));
#endif
}
FG_FN int clamp_index(int i, int n) { return int_max(0, int_min(i, n - 1)); }
FG_FN int clamp_index(long long i, int n) { return (int)int_max(0ll, int_min(i, (long long)n - 1)); }
// The rows of packed sequence b; whatever the offsets are, they lie within the tensor's.
FG_FN Range sequence(const int* offsets, int b, int rows) {
  const int begin = clamp_index(offsets[b], rows + 1), end = clamp_index(offsets[b + 1], rows + 1);
  return Range{begin, int_max(begin, end)};
}

}  // namespace fg
