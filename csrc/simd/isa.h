// The kernels of each instruction set, declared. Weak: a build for one machine leaves the others out, and the address
// of what was left out is null.
#pragma once

#define MULTIMAX_DECLARE_FOR(isa, Kernels, kernels)   \
  namespace isa {                                     \
  extern const Kernels kernels __attribute__((weak)); \
  }

#define MULTIMAX_DECLARE(Kernels, kernels)         \
  MULTIMAX_DECLARE_FOR(baseline, Kernels, kernels) \
  MULTIMAX_DECLARE_FOR(avx2, Kernels, kernels)     \
  MULTIMAX_DECLARE_FOR(avx512, Kernels, kernels)   \
  MULTIMAX_DECLARE_FOR(avx512_bf16, Kernels, kernels)
