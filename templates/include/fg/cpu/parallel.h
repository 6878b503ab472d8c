// OpenMP where the compiler has it; without it the pragmas vanish and one thread does everything.
#pragma once
#include "fg/cpu/vector.h"

#include <cstdlib>
#if defined(_OPENMP)
#include <omp.h>
#endif

namespace fg {

#if defined(_OPENMP)
FG_FN int thread_index() { return omp_get_thread_num(); }
FG_FN int thread_count() { return omp_get_num_threads(); }
#else
FG_FN int thread_index() { return 0; }
FG_FN int thread_count() { return 1; }
#endif

// Tasks that a thread takes at a time: enough to make the shared counter cheap, few enough to leave something to balance with.
FG_FN int tasks_per_turn(long long tasks, int threads) { return (int)int_max(1ll, int_min(tasks / (256ll * threads), 64ll)); }

// Threads worth waking for so many multiply-adds; one does a million in some twenty microseconds, what waking another costs.
FG_FN int useful_threads(double multiply_adds, int threads) { return 1 + (int)int_min(multiply_adds * 1e-6, threads - 1.0); }

// Called by the hooks to add to the gradient of a captured tensor. Each thread has its own sums (see fg_backward).
FG_FN void grad_add(double* address, real value) { *address += value; }

// A thread-local object's address in a register: a compiler that sees where it comes from asks the run-time for it again inside inner loops.
template <class S> FG_FN S& in_register(S& object) {
  S* address = &object;
  asm("" : "+r"(address));
  return *address;
}

// A buffer of `count` reals aligned to vectors, not initialised; `data` is null if memory ran out.
struct Buffer {
  real* data;
  explicit Buffer(long long count) : data(static_cast<real*>(std::aligned_alloc(64, (count * sizeof(real) / 64 + 1) * 64))) {}
  ~Buffer() { std::free(data); }
  Buffer(const Buffer&) = delete;
};

}  // namespace fg
