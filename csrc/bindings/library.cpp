// What the operations share, and the choice of the instruction set.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <atomic>
#include <limits>
#include <type_traits>

#include "bindings/bindings.h"

namespace multimax {
namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

// clang-format off
#define MULTIMAX_KERNELS(isa) {&isa::row_kernels, &isa::attention_kernels, &isa::loss_kernels, &isa::entmax_kernels}
// clang-format on

// Instruction sets in rising order; null where the machine has not the instructions or the build not the kernels.
Kernels kernels_of(int64_t isa) {
  if (isa == 0) return MULTIMAX_KERNELS(baseline);
#if defined(__x86_64__)
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (isa == 1 && avx2) return MULTIMAX_KERNELS(avx2);
  if (isa == 2 && avx512) return MULTIMAX_KERNELS(avx512);
  if (isa == 3 && avx512 && __builtin_cpu_supports("avx512bf16")) return MULTIMAX_KERNELS(avx512_bf16);
#endif
  return {};
}

// -1 if there is none: a build for one machine, on another.
int64_t best_isa() {
  int64_t isa = 3;
  while (isa >= 0 && kernels_of(isa).rows == nullptr) --isa;
  return isa;
}

std::atomic<int64_t> current_isa{-1};

// Chooses an instruction set (-1: leave as it is); returns the one in use.
int64_t use_isa(int64_t isa) {
  if (isa >= 0) {
    STD_TORCH_CHECK(kernels_of(isa).rows != nullptr,
                    "multimax: this machine or this build has no instruction set number ", isa);
    current_isa.store(isa);
  }
  isa = current_isa.load();
  return isa < 0 ? best_isa() : isa;
}

template <class F>
void with_type(DType dtype, F f) {
  switch (dtype) {
    case DType::f32:
      return f(float{});
    case DType::f64:
      return f(double{});
    case DType::bf16:
      return f(BFloat16{});
    case DType::f16:
      return f(Half{});
  }
}

}  // namespace

Kernels kernels() {
  int64_t isa = current_isa.load();
  Kernels found = kernels_of(isa < 0 ? best_isa() : isa);
  STD_TORCH_CHECK(found.rows != nullptr, "multimax: the kernels were built for another machine");
  return found;
}

DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return DType::f32;
    case ScalarType::Double:
      return DType::f64;
    case ScalarType::BFloat16:
      return DType::bf16;
    case ScalarType::Half:
      return DType::f16;
    default:
      STD_TORCH_CHECK(false, "multimax: expected a floating-point tensor");
  }
}

double floor_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return std::numeric_limits<float>::lowest() / 2;
    case DType::f64:
      return std::numeric_limits<double>::lowest() / 2;
    case DType::bf16:
      return static_cast<float>(std::numeric_limits<BFloat16>::lowest()) / 2;
    case DType::f16:
      return static_cast<float>(std::numeric_limits<Half>::lowest()) / 2;
  }
  return 0;
}

void* data_of(const Tensor& t) {
  void* data = t.data_ptr();
  STD_TORCH_CHECK(data != nullptr || t.numel() == 0, "multimax: expected tensors with memory, got one that was freed");
  return data;
}

std::vector<double> read(const Tensor& tensor) {
  Tensor flat = tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
  std::vector<double> values(flat.numel());
  with_type(dtype_of(flat), [&]<class T>(T) {
    const T* from = static_cast<const T*>(data_of(flat));
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(from[i]);
  });
  return values;
}

void write(Tensor& tensor, const std::vector<double>& values) {
  with_type(dtype_of(tensor), [&]<class T>(T) {
    T* to = static_cast<T*>(tensor.mutable_data_ptr());
    // no direct way from double to a half type; the second rounding matters for one value in 2^13
    for (size_t i = 0; i < values.size(); ++i) {
      if constexpr (std::is_same_v<T, double>) {
        to[i] = values[i];
      } else {
        to[i] = static_cast<T>(static_cast<float>(values[i]));
      }
    }
  });
}

}  // namespace multimax

// All other schemas are defined in Python, so that they exist without this library.
STABLE_TORCH_LIBRARY_FRAGMENT(multimax, m) { m.def("use_isa(int isa) -> int"); }

STABLE_TORCH_LIBRARY_IMPL(multimax, CompositeExplicitAutograd, m) { m.impl("use_isa", TORCH_BOX(&multimax::use_isa)); }
