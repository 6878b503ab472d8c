// Functions that score and mask functions call, on the host, for float and double.
// The float versions of the common ones have no branches and no tables, so that a compiler turns loops over them into vector code; errors in ulp are
// noted where they exceed 1. Doubles and rare functions are those of the C library.
#pragma once
#include "fg/base.h"

#ifndef FG_COARSE
#define FG_COARSE 0  // 1 where inputs have 16 bits: functions of the score may then be as coarse as their inputs
#endif

namespace fg {

FG_FN double bits_to_double(unsigned long long u) { double d; memcpy(&d, &u, 8); return d; }

FG_FN float floor(float x) { return __builtin_floorf(x); }
FG_FN double floor(double x) { return __builtin_floor(x); }
FG_FN float ceil(float x) { return __builtin_ceilf(x); }
FG_FN double ceil(double x) { return __builtin_ceil(x); }
FG_FN float trunc(float x) { return __builtin_truncf(x); }
FG_FN double trunc(double x) { return __builtin_trunc(x); }
FG_FN float round(float x) { return __builtin_rintf(x); }  // half to even
FG_FN double round(double x) { return __builtin_rint(x); }
FG_FN float abs(float x) { return __builtin_fabsf(x); }
FG_FN double abs(double x) { return __builtin_fabs(x); }
FG_FN float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
FG_FN float sqrt(float x) { return __builtin_sqrtf(x); }
FG_FN double sqrt(double x) { return __builtin_sqrt(x); }
FG_FN float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
FG_FN double rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }
template <class R> FG_FN R minimum(R a, R b) { return (a < b) | (a != a) ? a : b; }  // NaN if either is
template <class R> FG_FN R maximum(R a, R b) { return (a > b) | (a != a) ? a : b; }
template <class R> FG_FN R sign(R x) { return R(x > 0) - R(x < 0); }
FG_FN float fmod(float a, float b) { return __builtin_fmodf(a, b); }
FG_FN double fmod(double a, double b) { return __builtin_fmod(a, b); }
template <class R> FG_FN R remainder(R a, R b) {  // floored, as Python's %
  const R r = fmod(a, b);
  return r + ((r != 0) & ((r < 0) != (b < 0)) ? b : R(0));
}

// 2^n for an integer-valued n in [-126, 127]
FG_FN float power_of_two(float n) { return bits_to_float((unsigned)((int)n + 127) << 23); }

// e^r - 1 = r + r^2 / 2 + ... for |r| <= ln(2) / 2: relative error 2.4e-10 before rounding
FG_FN float expm1_reduced(float r) {
  float p = 1.98992739e-4f;
  p = p * r + 1.394110843e-3f;
  p = p * r + 8.333298484e-3f;
  p = p * r + 4.166635290e-2f;
  p = p * r + 1.666666672e-1f;
  p = p * r + 5.000000047e-1f;
  return p * r * r + r;
}

// x = n ln 2 + r; ln 2 in two parts, the first with few enough bits for n times it to be exact
FG_FN float reduce_by_ln2(float x, float n) { return (x - n * 6.93145752e-1f) - n * 1.42860677e-6f; }

// The power of two is applied in two steps, so that results down to the smallest subnormal and up to the largest float come out right.
FG_FN float scale_by_power(float x, float n) {
  const float half = __builtin_floorf(n * 0.5f);
  return x * power_of_two(half) * power_of_two(n - half);
}

FG_FN float exp(float x) {
  const float inside = x < -104.0f ? -104.0f : x > 89.0f ? 89.0f : x;
  const float n = __builtin_rintf(inside * (float)LOG2E);
  return scale_by_power(1.0f + expm1_reduced(reduce_by_ln2(inside, n)), n);
}
FG_FN double exp(double x) { return __builtin_exp(x); }
FG_FN float exp2(float x) {
  const float inside = x < -151.0f ? -151.0f : x > 129.0f ? 129.0f : x;
  const float n = __builtin_rintf(inside);
  return scale_by_power(1.0f + expm1_reduced((inside - n) * (float)LN2), n);
}
FG_FN double exp2(double x) { return __builtin_exp2(x); }
FG_FN float expm1(float x) {
  const float inside = x < -18.0f ? -18.0f : x > 89.0f ? 89.0f : x;
  const float n = __builtin_rintf(inside * (float)LOG2E);
  const float half = power_of_two(n - 1.0f);  // 2^128 is no float, twice 2^127 overflows only if the result does
  return 2.0f * (half * expm1_reduced(reduce_by_ln2(inside, n)) + (half - 0.5f));
}
FG_FN double expm1(double x) { return __builtin_expm1(x); }

// Natural logarithm of x = 2^k m with m in [sqrt(1/2), sqrt(2)): k ln 2 + log(m).
struct Mantissa { float k, m; };
FG_FN Mantissa split(float x) {
  const bool subnormal = x < 1.17549435e-38f;
  const unsigned bits = float_to_bits(subnormal ? x * 8388608.0f : x) - 0x3f3504f3u;  // of sqrt(1/2)
  return Mantissa{(float)((int)bits >> 23) - (subnormal ? 23.0f : 0.0f), bits_to_float((bits & 0x7fffffu) + 0x3f3504f3u)};
}
FG_FN float log_reduced(float m) {  // Cephes logf
  const float r = m - 1.0f, s = r * r;
  float p = 7.0376836292e-2f;
  p = p * r - 1.1514610310e-1f;
  p = p * r + 1.1676998740e-1f;
  p = p * r - 1.2420140846e-1f;
  p = p * r + 1.4249322787e-1f;
  p = p * r - 1.6668057665e-1f;
  p = p * r + 2.0000714765e-1f;
  p = p * r - 2.4999993993e-1f;
  p = p * r + 3.3333331174e-1f;
  return r + (p * r * s - 0.5f * s);
}
FG_FN float log_special(float x, float result) {  // what lies outside the positive finite numbers
  result = x == infinity<float>() ? x : result;
  result = x == 0.0f ? -infinity<float>() : result;
  return (x < 0.0f) | (x != x) ? not_a_number<float>() : result;
}
FG_FN float log(float x) {
  const Mantissa s = split(x);
  return log_special(x, s.k * 6.93145752e-1f + (log_reduced(s.m) + s.k * 1.42860677e-6f));
}
FG_FN double log(double x) { return __builtin_log(x); }
FG_FN float log2(float x) {  // 2 ulp
  const Mantissa s = split(x);
  return log_special(x, log_reduced(s.m) * (float)LOG2E + s.k);
}
FG_FN double log2(double x) { return __builtin_log2(x); }
FG_FN float log1p(float x) {  // the rounding error of 1 + x comes back divided by it
  const float u = 1.0f + x, lost = x - (u - 1.0f);
  return (u == infinity<float>()) | (u == 0.0f) ? log(u) : log(u) + lost / u;
}
FG_FN double log1p(double x) { return __builtin_log1p(x); }

FG_FN float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }
FG_FN double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }

// a division of the score; on a GPU it may be as coarse as 16-bit inputs
FG_FN float divide(float x, float y) { return x / y; }
FG_FN double divide(double x, double y) { return x / y; }

// 1 / q for a positive normal q without a division, which vector units do one at a time: a guess from the exponent (12% off), then third-order steps,
// each cubing the error; two of them leave about an ulp, one and a second-order step 3e-6.
FG_FN float reciprocal(float q) {
  float r = bits_to_float(0x7ef311c7u - float_to_bits(q));
  float e = 1.0f - q * r;
  r += r * (e * e + e);
  e = 1.0f - q * r;
  return FG_COARSE ? r + r * e : r + r * (e * e + e);
}

// x P(x^2) / Q(x^2), fitted up to the x from which on tanh rounds to 1: a relative error of 2.2e-8 (5 ulp after rounding, exact near 0), or of 1.1e-6 for
// 16-bit inputs. A soft-cap runs it on every score.
FG_FN float tanh(float x) {
  const float most = FG_COARSE ? 7.0f : 9.01f, s = x * x;
#if FG_COARSE
  float p = 4.02323679e-6f;
  p = p * s + 2.29972058e-3f;
  p = p * s + 1.23301643e-1f;
  p = p * s + 1.0f;
  float q = 1.44660450e-4f;
  q = q * s + 2.11841788e-2f;
  q = q * s + 4.56629750e-1f;
  q = q * s + 1.0f;
#else
  float p = 1.34018743e-8f;
  p = p * s + 2.06484074e-5f;
  p = p * s + 3.49821849e-3f;
  p = p * s + 1.33833259e-1f;
  p = p * s + 1.0f;
  float q = 7.79741356e-7f;
  q = q * s + 3.28976428e-4f;
  q = q * s + 2.58872509e-2f;
  q = q * s + 4.67166483e-1f;
  q = q * s + 1.0f;
#endif
  const float inside = x * p * reciprocal(q);
  return __builtin_fabsf(x) > most ? __builtin_copysignf(1.0f, x) : inside;  // one comparison; a NaN stays
}
FG_FN double tanh(double x) { return __builtin_tanh(x); }

// tanh of an argument known to be at most NEAR_TANH in magnitude, for 16-bit inputs: a relative error of 1.1e-6.
constexpr float NEAR_TANH = 0.8f;
FG_FN float tanh_near(float x) {
  const float s = x * x;
  float p = 1.21001484e-2f;
  p = p * s - 4.91801567e-2f;
  p = p * s + 1.32305663e-1f;
  p = p * s - 3.33253721e-1f;
  p = p * s + 9.99998994e-1f;
  return x * p;
}
FG_FN float sinh(float x) {
  const float a = __builtin_fabsf(x), t = expm1(a > 88.0f ? a * 0.5f : a);
  const float small = 0.5f * (t + t / (t + 1.0f)), large = (0.5f * (t + 1.0f)) * (t + 1.0f);  // large: e^a / 2 from e^(a / 2)
  return __builtin_copysignf(a > 88.0f ? large : small, x);
}
FG_FN double sinh(double x) { return __builtin_sinh(x); }
FG_FN float cosh(float x) {
  const float a = __builtin_fabsf(x), e = exp(a > 88.0f ? a * 0.5f : a);
  return a > 88.0f ? 0.5f * e * e : 0.5f * (e + 1.0f / e);
}
FG_FN double cosh(double x) { return __builtin_cosh(x); }

// erf: x P(x^2) near 0, else 1 - e^(polynomial); both sides computed and one chosen.
FG_FN float erf(float x) {
  const float a = __builtin_fabsf(x), s = x * x;
  float tail = -1.72853470e-5f * a + 3.83197126e-4f;
  const float other = -3.88396438e-3f * a + 2.42546219e-2f;
  tail = tail * s + other;
  tail = tail * a - 1.06777877e-1f;
  tail = tail * a - 6.34846687e-1f;
  tail = tail * a - 1.28717512e-1f;
  tail = tail * a - a;
  tail = a > 4.0f ? 1.0f : 1.0f - exp(tail);
  float near = -5.96761703e-4f;
  near = near * s + 4.99119423e-3f;
  near = near * s - 2.67681349e-2f;
  near = near * s + 1.12819925e-1f;
  near = near * s - 3.76125336e-1f;
  near = near * s + 1.28379166e-1f;
  near = near * x + x;
  return a > 0.927734375f ? __builtin_copysignf(tail, x) : near;
}
FG_FN double erf(double x) { return __builtin_erf(x); }

// x - n pi / 2 in double, pi / 2 in two parts: right for every float below 2^31, beyond that a value in [-1, 1].
struct Angle { float r; int quadrant; };
FG_FN Angle reduce_angle(float x) {
  const double n = __builtin_rint((double)x * 0.63661977236758134308);
  const float r = (float)(((double)x - n * 1.57079632679489661923) - n * 6.123233995736766e-17);
  return Angle{r > 0.8f ? 0.8f : r < -0.8f ? -0.8f : r, (int)n};
}
FG_FN float sine_reduced(float r) {
  const float s = r * r;
  float p = 2.86567956e-6f;
  p = p * s - 1.98559923e-4f;
  p = p * s + 8.33338592e-3f;
  p = p * s - 1.66666672e-1f;
  return p * s * r + r;
}
FG_FN float cosine_reduced(float r) {
  const float s = r * r;
  float p = 2.44677067e-5f;
  p = p * s - 1.38877297e-3f;
  p = p * s + 4.16666567e-2f;
  p = p * s - 5.00000000e-1f;
  return p * s + 1.0f;
}
FG_FN float quadrant_value(Angle a, int turns) {
  const int q = a.quadrant + turns;
  const float value = q & 1 ? cosine_reduced(a.r) : sine_reduced(a.r);
  return q & 2 ? -value : value;
}
FG_FN float sin(float x) { return quadrant_value(reduce_angle(x), 0); }
FG_FN double sin(double x) { return __builtin_sin(x); }
FG_FN float cos(float x) { return quadrant_value(reduce_angle(x), 1); }
FG_FN double cos(double x) { return __builtin_cos(x); }
FG_FN float tan(float x) {  // 3 ulp
  const Angle a = reduce_angle(x);
  const float s = sine_reduced(a.r), c = cosine_reduced(a.r);
  return a.quadrant & 1 ? -c / s : s / c;
}
FG_FN double tan(double x) { return __builtin_tan(x); }
FG_FN float asin(float x) { return __builtin_asinf(x); }
FG_FN double asin(double x) { return __builtin_asin(x); }
FG_FN float acos(float x) { return __builtin_acosf(x); }
FG_FN double acos(double x) { return __builtin_acos(x); }
FG_FN float atan(float x) { return __builtin_atanf(x); }
FG_FN double atan(double x) { return __builtin_atan(x); }
FG_FN float atan2(float y, float x) { return __builtin_atan2f(y, x); }
FG_FN double atan2(double y, double x) { return __builtin_atan2(y, x); }
FG_FN float pow(float x, float y) { return __builtin_powf(x, y); }
FG_FN double pow(double x, double y) { return __builtin_pow(x, y); }

}  // namespace fg
