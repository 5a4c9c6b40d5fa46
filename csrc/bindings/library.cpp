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

#define MULTIMAX_KERNELS_OF(isa, dtype) \
  {&isa::row_kernels_##dtype, &isa::attention_kernels, &isa::loss_kernels_##dtype, &isa::entmax_kernels_##dtype}
#define MULTIMAX_KERNELS(isa)                                                                    \
  {MULTIMAX_KERNELS_OF(isa, f32), MULTIMAX_KERNELS_OF(isa, f64), MULTIMAX_KERNELS_OF(isa, bf16), \
   MULTIMAX_KERNELS_OF(isa, f16)}

// By instruction set, in rising order, and dtype; null where the build has not the kernels.
enum Isa : int64_t { baseline_isa, avx2_isa, avx512_isa, avx512_bf16_isa, isas };
const Kernels all_kernels[isas][4] = {
    MULTIMAX_KERNELS(baseline),
#if defined(__x86_64__)
    MULTIMAX_KERNELS(avx2),
    MULTIMAX_KERNELS(avx512),
    MULTIMAX_KERNELS(avx512_bf16),
#endif
};

const Kernels& kernels_of(int64_t isa, DType dtype) { return all_kernels[isa][static_cast<int>(dtype)]; }

// Whether the machine has the instructions and the build the kernels. All sets have kernels for bfloat16.
bool has_isa(int64_t isa) {
  if (isa < 0 || isa >= isas || kernels_of(isa, DType::bf16).rows == nullptr) return false;
  if (isa == baseline_isa) return true;
#if defined(__x86_64__)
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (isa == avx2_isa) return avx2;
  if (isa == avx512_isa) return avx512;
  return avx512 && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

// -1 if there is none: a build for one machine, on another.
int64_t best_isa() {
  int64_t isa = isas - 1;
  while (isa >= 0 && !has_isa(isa)) --isa;
  return isa;
}

std::atomic<int64_t> current_isa{-1};

// Chooses an instruction set (-1: leave as it is); returns the one in use.
int64_t use_isa(int64_t isa) {
  if (isa >= 0) {
    STD_TORCH_CHECK(has_isa(isa), "multimax: this machine or this build has no instruction set number ", isa);
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

std::vector<double> read(const Tensor& tensor) {
  Tensor flat = tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
  std::vector<double> values(flat.numel());
  with_type(dtype_of(flat), [&]<class T>(T) {
    const T* from = static_cast<const T*>(data_of(flat));
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(from[i]);
  });
  return values;
}

}  // namespace

Kernels kernels(DType dtype) {
  int64_t isa = current_isa.load();
  if (isa < 0) isa = best_isa();
  STD_TORCH_CHECK(isa >= 0, "multimax: the kernels were built for another machine");
  // avx512_bf16 has kernels of its own for bfloat16 alone
  return kernels_of(isa == avx512_bf16_isa && dtype != DType::bf16 ? avx512_isa : isa, dtype);
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

void* data_of(const Tensor& t) {
  void* data = t.data_ptr();
  STD_TORCH_CHECK(data != nullptr || t.numel() == 0, "multimax: expected tensors with memory, got one that was freed");
  return data;
}

Parameters::Parameters(const Tensor& coefs, const Tensor& knots, DType dtype)
    : order_(static_cast<size_t>(coefs.size(coefs.dim() - 2))), coefs_(read(coefs)) {
  const std::vector<double> of_knots = read(knots);
  auto arrange = [&](auto& to) {
    to.resize(2 * coefs_.size());
    for (size_t from = 0; from < coefs_.size(); ++from) {
      size_t side = from % 2, n = from / 2 % order_, set = from / 2 / order_;
      to[(set * 4 + side) * order_ + n] = static_cast<std::decay_t<decltype(to[0])>>(coefs_[from]);
      to[(set * 4 + 2 + side) * order_ + n] = static_cast<std::decay_t<decltype(to[0])>>(of_knots[from]);
    }
  };
  dtype == DType::f64 ? arrange(f64_) : arrange(f32_);
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
