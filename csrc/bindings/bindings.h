// What the operations share: tensors' types and memory, numbers in and out, the instruction set, the threads.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <new>
#include <vector>

#include "attention/attention.h"
#include "entmax/entmax.h"
#include "loss/loss.h"
#include "rows/rows.h"

namespace multimax {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The kernels of one instruction set and dtype. Those for attention take any but float64.
struct Kernels {
  const RowKernels* rows;
  const AttentionKernels* attention;
  const LossKernels* loss;
  const EntmaxKernels* entmax;
};

// Of the instruction set in use. To be asked once per call: it may be changed from another thread.
Kernels kernels(DType dtype);

DType dtype_of(const Tensor& t);
void* data_of(const Tensor& t);
void write(Tensor& tensor, const std::vector<double>& values);

// Coefs and knots as the kernels want them: (sets, 4, order) of the compute type, lower, upper coefs, lower, upper
// knots.
class Parameters {
 public:
  Parameters(const Tensor& coefs, const Tensor& knots, DType dtype);

  size_t order() const { return order_; }
  const std::vector<double>& coefs() const { return coefs_; }
  const void* data() const { return f64_.empty() ? static_cast<const void*>(f32_.data()) : f64_.data(); }

 private:
  size_t order_;
  std::vector<double> coefs_;
  std::vector<float> f32_;  // one of the two is empty
  std::vector<double> f64_;
};

// The parameters' gradients, from the kernels' sums of all that does not depend on x.
class ParamGrads {
 public:
  explicit ParamGrads(const Parameters& params)
      : params_(params), coefs_(params.coefs().size()), knots_(params.coefs().size()) {}

  // sum: (order, 4), for one set
  void add(int64_t set, const double* sum) {
    size_t at = static_cast<size_t>(set) * 2 * params_.order();
    for (size_t n = 0; n < params_.order(); ++n, sum += 4, at += 2) {
      coefs_[at] += sum[0];
      knots_[at] += sum[1];
      coefs_[at + 1] += sum[2];
      knots_[at + 1] -= sum[3];
    }
  }
  void write(Tensor& coefs, Tensor& knots) {
    for (size_t i = 0; i < knots_.size(); ++i) {
      knots_[i] *= params_.coefs()[i] * static_cast<double>(i / 2 % params_.order() + 1);
    }
    multimax::write(coefs, coefs_);
    multimax::write(knots, knots_);
  }

 private:
  const Parameters& params_;
  std::vector<double> coefs_, knots_;
};

class Scratch {
 public:
  explicit Scratch(int64_t bytes) : memory_(::operator new(static_cast<size_t>(bytes), alignment)) {}
  ~Scratch() { ::operator delete(memory_, alignment); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* get() const { return memory_; }

 private:
  static constexpr std::align_val_t alignment{64};
  void* memory_;
};

// Calls f on that many of torch's threads, with the number of the thread and scratch memory.
template <class F>
void with_workers(int64_t workers, int64_t scratch_bytes, F f) {
  torch::stable::parallel_for(0, workers, 1, [&](int64_t first, int64_t last) {
    const Scratch scratch(scratch_bytes);
    for (int64_t worker = first; worker < last; ++worker) f(worker, scratch.get());
  });
}

// Shares [0, n) over torch's threads, each with scratch memory of its own.
template <class F>
void share(int64_t n, int64_t grain, int64_t scratch_bytes, F f) {
  torch::stable::parallel_for(0, n, grain, [&](int64_t first, int64_t last) {
    const Scratch scratch(scratch_bytes);
    f(first, last, scratch.get());
  });
}

}  // namespace multimax
