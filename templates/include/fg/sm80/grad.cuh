// Sums into the gradients of captured tensors, which many threads and blocks reach in any order.
#pragma once
#include "fg/base.h"

namespace fg {

// Where a whole warp adds to one entry (a number per head, the ends of a clamped table), its sum is one atomic addition.
FG_FN void grad_add(float* address, float value) {
  constexpr unsigned ALL = 0xffffffffu;
  int alike = 0;
  if (__activemask() == ALL) __match_all_sync(ALL, (unsigned long long)address, &alike);
  if (!alike) {
    atomicAdd(address, value);
    return;
  }
  for (int i = 16; i; i >>= 1) value += __shfl_xor_sync(ALL, value, i);
  if (threadIdx.x % 32 == 0) atomicAdd(address, value);
}

// A sum that does not depend on the order of its terms: integer additions commute. A float is cut into parts, each a multiple of its own quantum; terms below 2^35
// in number cannot overflow a part, and nothing above 2^-68 is lost. The host adds the parts up: sum of parts[i] * quantum(i), plus `rest`.
struct ExactSum {
  long long parts[3];  // quanta 2^-8, 2^-38, 2^-68
  double rest;         // NaN, Inf, and +-Inf for terms beyond 2^50
};
FG_FN void grad_add(ExactSum* sum, float value) {
  if (!(fabsf(value) < 1.1258999e15f)) {
    atomicAdd(&sum->rest, value != value ? (double)value : value < 0.0f ? -infinity<double>() : infinity<double>());
    return;
  }
  double left = value;
  double inverse = 256.0;  // of the part's quantum
#pragma unroll
  for (int i = 0; i < 3; ++i, inverse *= 1073741824.0) {
    const long long part = (long long)(left * inverse);
    if (part) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&sum->parts[i]), (unsigned long long)part);
      left -= (double)part / inverse;  // exact: powers of two
    }
  }
}

}  // namespace fg
