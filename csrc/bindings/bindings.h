// What the operations share: tensors' types and memory, numbers in and out, the instruction set, the threads.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <memory>
#include <new>
#include <vector>

#include "attention/attention.h"
#include "entmax/entmax.h"
#include "loss/loss.h"
#include "rows/rows.h"

namespace multimax {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// One instruction set's kernels.
struct Kernels {
  const RowKernels* rows;
  const AttentionKernels* attention;
  const LossKernels* loss;
  const EntmaxKernels* entmax;
};

// Of the instruction set in use. To be asked once a call: it may be changed from another thread.
Kernels kernels();

DType dtype_of(const Tensor& t);
double floor_of(DType dtype);  // half of the lowest finite value: at or below it an entry counts as masked
void* data_of(const Tensor& t);
std::vector<double> read(const Tensor& tensor);
void write(Tensor& tensor, const std::vector<double>& values);

// Numbers as the kernels want them: (sets, 4, order), lower, upper coefs, lower, upper knots.
template <class C>
std::vector<C> params_of(const std::vector<double>& coefs, const std::vector<double>& knots, size_t order) {
  std::vector<C> params(2 * coefs.size());
  for (size_t set = 0; set < coefs.size() / (2 * order); ++set) {
    for (size_t n = 0; n < order; ++n) {
      for (size_t side = 0; side < 2; ++side) {
        size_t from = (set * order + n) * 2 + side;
        params[(set * 4 + side) * order + n] = static_cast<C>(coefs[from]);
        params[(set * 4 + 2 + side) * order + n] = static_cast<C>(knots[from]);
      }
    }
  }
  return params;
}

// The parameters' gradients, from the kernels' sums of all that does not depend on x.
class ParamGrads {
 public:
  ParamGrads(const std::vector<double>& coefs, size_t order)
      : of_coefs_(coefs), order_(order), coefs_(coefs.size()), knots_(coefs.size()) {}

  // sum: (order, 4), for one set
  void add(int64_t set, const double* sum) {
    size_t at = static_cast<size_t>(set) * 2 * order_;
    for (size_t n = 0; n < order_; ++n, sum += 4, at += 2) {
      coefs_[at] += sum[0];
      knots_[at] += sum[1];
      coefs_[at + 1] += sum[2];
      knots_[at + 1] -= sum[3];
    }
  }
  void write(Tensor& coefs, Tensor& knots) {
    for (size_t i = 0; i < knots_.size(); ++i) knots_[i] *= of_coefs_[i] * static_cast<double>(i / 2 % order_ + 1);
    multimax::write(coefs, coefs_);
    multimax::write(knots, knots_);
  }

 private:
  const std::vector<double>& of_coefs_;
  size_t order_;
  std::vector<double> coefs_, knots_;
};

// Shares [0, n) over torch's threads, each with scratch memory of its own.
template <class F>
void share(int64_t n, int64_t grain, int64_t scratch_bytes, F f) {
  torch::stable::parallel_for(0, n, grain, [&](int64_t first, int64_t last) {
    constexpr std::align_val_t alignment{64};
    auto release = [](void* p) { ::operator delete(p, alignment); };
    std::unique_ptr<void, decltype(release)> scratch(::operator new(static_cast<size_t>(scratch_bytes), alignment),
                                                     release);
    f(first, last, scratch.get());
  });
}

}  // namespace multimax
