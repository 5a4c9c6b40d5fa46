// What the kernels are compiled for: instruction sets, and types of tensors.
//
// Symbols are weak: a build for one machine leaves the other instruction sets out, and the address of what was left out
// is null. avx512_bf16 is avx512 with other bfloat16 kernels, and has no others.
#pragma once

namespace multimax {

enum class DType { f32, f64, bf16, f16 };

}  // namespace multimax

#define MULTIMAX_WEAK __attribute__((weak))

// Kernels that are compiled once for each instruction set.
#define MULTIMAX_DECLARE_FOR(isa, Kernels, kernels) \
  namespace isa {                                   \
  extern const Kernels kernels MULTIMAX_WEAK;       \
  }
#define MULTIMAX_DECLARE(Kernels, kernels)         \
  MULTIMAX_DECLARE_FOR(baseline, Kernels, kernels) \
  MULTIMAX_DECLARE_FOR(avx2, Kernels, kernels)     \
  MULTIMAX_DECLARE_FOR(avx512, Kernels, kernels)   \
  MULTIMAX_DECLARE_FOR(avx512_bf16, Kernels, kernels)

// Kernels that are compiled once for each instruction set and dtype, which ends their name.
#define MULTIMAX_DECLARE_DTYPES(Kernels, kernels) \
  MULTIMAX_DECLARE(Kernels, kernels##_f32)        \
  MULTIMAX_DECLARE(Kernels, kernels##_f64)        \
  MULTIMAX_DECLARE(Kernels, kernels##_bf16)       \
  MULTIMAX_DECLARE(Kernels, kernels##_f16)
