// Device functions that score and mask functions call, for float and double. Include after part/config: `T` is the type of q, k, v.
// Kernels of 16-bit types take the special-function unit where its error lies far below the rounding of T; kernels of float take libdevice's functions
// (1-2 ulp). Whatever a mask is likely to compare exactly (sqrt, floor, fmod, remainder ...) is IEEE in both.
#pragma once
#include "fg/base.h"

namespace fg {

constexpr bool FAST_MATH = sizeof(T) == 2;

// MUFU operations (PTX ISA 9.0, 9.7.3): the error of each follows its name.
FG_FN float approximate_exp2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }         // 2^-22 relative
FG_FN float approximate_log2(float x) { float y; asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }             // 2^-22 absolute in [0.5, 2], else relative
FG_FN float approximate_tanh(float x) { float y; asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }            // 2^-11 relative
FG_FN float approximate_sin(float x) { float y; asm("sin.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }              // 2^-21 absolute in [-pi, pi]
FG_FN float approximate_cos(float x) { float y; asm("cos.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }              // 2^-21 absolute in [-pi, pi]
FG_FN float approximate_inverse(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }          // 1 ulp
FG_FN float approximate_inverse_root(float x) { float y; asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }   // 2^-22 relative

FG_FN float exp2(float x) { return FAST_MATH ? approximate_exp2(x) : ::exp2f(x); }
FG_FN float exp(float x) { return FAST_MATH ? approximate_exp2(x * (float)LOG2E) : ::expf(x); }
FG_FN float expm1(float x) { return ::expm1f(x); }
FG_FN float log2(float x) { return FAST_MATH ? approximate_log2(x) : ::log2f(x); }
FG_FN float log(float x) { return FAST_MATH ? approximate_log2(x) * (float)LN2 : ::logf(x); }
FG_FN float log1p(float x) { return ::log1pf(x); }
FG_FN float sqrt(float x) { return ::sqrtf(x); }
FG_FN float rsqrt(float x) { return FAST_MATH ? approximate_inverse_root(x) : ::rsqrtf(x); }

// x minus the nearest multiple of 2 pi, in three parts: good to 2^-20 for |x| < 1e4, beyond that to 2^-24 |x|.
FG_FN float reduce_angle(float x) {
  const float turns = ::rintf(x * 0.15915494f);
  return ::fmaf(turns, 1.7484555e-7f, ::fmaf(turns, -6.2831855f, x));
}
FG_FN float sin(float x) { return FAST_MATH ? approximate_sin(reduce_angle(x)) : ::sinf(x); }
FG_FN float cos(float x) { return FAST_MATH ? approximate_cos(reduce_angle(x)) : ::cosf(x); }
FG_FN float tan(float x) {
  const float angle = reduce_angle(x);
  return FAST_MATH ? approximate_sin(angle) / approximate_cos(angle) : ::tanf(x);
}
FG_FN float asin(float x) { return ::asinf(x); }
FG_FN float acos(float x) { return ::acosf(x); }
FG_FN float atan(float x) { return ::atanf(x); }
FG_FN float atan2(float y, float x) { return ::atan2f(y, x); }
FG_FN float sinh(float x) { return ::sinhf(x); }
FG_FN float cosh(float x) { return ::coshf(x); }

// As exact as a tanh in float16 would be. 1 - 2 / (1 + e^2x) is good to 2^-22, for two MUFU operations instead of one.
FG_FN float tanh(float x) { return FAST_MATH ? approximate_tanh(x) : ::tanhf(x); }
FG_FN float erf(float x) { return ::erff(x); }
FG_FN float sigmoid(float x) { return FAST_MATH ? approximate_inverse(1.0f + approximate_exp2(x * -(float)LOG2E)) : 1.0f / (1.0f + ::expf(-x)); }

FG_FN float pow(float x, float y) {
  if (!FAST_MATH) return ::powf(x, y);
  const float magnitude = y == 0.0f ? 1.0f : approximate_exp2(y * approximate_log2(::fabsf(x)));
  const float half = 0.5f * y;
  const bool integer = ::truncf(y) == y, odd = integer && ::truncf(half) != half;
  if (x < 0.0f && !integer && y - y == 0.0f) return not_a_number<float>();
  return x < 0.0f && odd ? -magnitude : magnitude;
}

// The quotient of a score function. A mask's and an index's are written with `/`, which is IEEE.
FG_FN float divide(float x, float y) { return FAST_MATH ? x * approximate_inverse(y) : x / y; }

FG_FN float floor(float x) { return ::floorf(x); }
FG_FN float ceil(float x) { return ::ceilf(x); }
FG_FN float trunc(float x) { return ::truncf(x); }
FG_FN float round(float x) { return ::rintf(x); }  // half to even
FG_FN float abs(float x) { return ::fabsf(x); }
FG_FN float fma(float x, float y, float z) { return ::fmaf(x, y, z); }
FG_FN float fmod(float x, float y) { return ::fmodf(x, y); }

FG_FN double exp(double x) { return ::exp(x); }
FG_FN double exp2(double x) { return ::exp2(x); }
FG_FN double expm1(double x) { return ::expm1(x); }
FG_FN double log(double x) { return ::log(x); }
FG_FN double log2(double x) { return ::log2(x); }
FG_FN double log1p(double x) { return ::log1p(x); }
FG_FN double sqrt(double x) { return ::sqrt(x); }
FG_FN double rsqrt(double x) { return ::rsqrt(x); }
FG_FN double sin(double x) { return ::sin(x); }
FG_FN double cos(double x) { return ::cos(x); }
FG_FN double tan(double x) { return ::tan(x); }
FG_FN double asin(double x) { return ::asin(x); }
FG_FN double acos(double x) { return ::acos(x); }
FG_FN double atan(double x) { return ::atan(x); }
FG_FN double atan2(double y, double x) { return ::atan2(y, x); }
FG_FN double sinh(double x) { return ::sinh(x); }
FG_FN double cosh(double x) { return ::cosh(x); }
FG_FN double tanh(double x) { return ::tanh(x); }
FG_FN double erf(double x) { return ::erf(x); }
FG_FN double sigmoid(double x) { return 1.0 / (1.0 + ::exp(-x)); }
FG_FN double pow(double x, double y) { return ::pow(x, y); }
FG_FN double divide(double x, double y) { return x / y; }
FG_FN double floor(double x) { return ::floor(x); }
FG_FN double ceil(double x) { return ::ceil(x); }
FG_FN double trunc(double x) { return ::trunc(x); }
FG_FN double round(double x) { return ::rint(x); }
FG_FN double abs(double x) { return ::fabs(x); }
FG_FN double fmod(double x, double y) { return ::fmod(x, y); }

// torch's semantics: a NaN wins, the remainder has the sign of the divisor, sign(NaN) is 0.
template <class R> FG_FN R minimum(R x, R y) { return x != x ? x : y != y ? y : y < x ? y : x; }
template <class R> FG_FN R maximum(R x, R y) { return x != x ? x : y != y ? y : x < y ? y : x; }
template <class R> FG_FN R remainder(R x, R y) {
  const R r = fmod(x, y);
  return r != R(0) && (r < R(0)) != (y < R(0)) ? r + y : r;
}
template <class R> FG_FN R sign(R x) { return R((x > R(0)) - (x < R(0))); }

}  // namespace fg
