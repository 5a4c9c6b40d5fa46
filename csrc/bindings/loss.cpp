// The loss's row part on torch's stable ABI: check and describe the tensors, share the work over torch's threads,
// finish the sums.
#include <algorithm>
#include <optional>

#include "bindings/bindings.h"

namespace multimax {
namespace {

using OptionalTensor = std::optional<Tensor>;

void expect(bool right, const char* what) { STD_TORCH_CHECK(right, "multimax: expected ", what); }

bool is_vector(const Tensor& t, ScalarType type, int64_t size) {
  return t.scalar_type() == type && t.dim() == 1 && t.size(0) == size && t.is_contiguous();
}

// What forward and backward have in common.
class Loss {
 public:
  LossJob job{};

  Loss(const Tensor& x, const OptionalTensor& target, const OptionalTensor& probabilities, const Tensor& coefs,
       const Tensor& knots, const OptionalTensor& weight, double smoothing, int64_t total_classes, int64_t first_class,
       int64_t ignore_index) {
    dtype_ = dtype_of(x);
    expect(x.dim() == 2 && (x.size(1) <= 1 || x.stride(1) == 1),
           "x of shape (rows, classes) with a contiguous last dim");
    job.rows = x.size(0);
    job.classes = x.size(1);
    job.x = data_of(x);
    job.row_stride = x.stride(0);

    expect(coefs.dim() == 2 && coefs.size(0) >= 1 && coefs.size(1) == 2, "coefs of shape (order, 2)");
    expect(knots.dim() == 2 && knots.size(0) == coefs.size(0) && knots.size(1) == 2, "knots of the shape of coefs");
    job.order = static_cast<int>(coefs.size(0));
    params_.emplace(coefs, knots, dtype_);
    job.params = params_->data();

    ScalarType compute = dtype_ == DType::f64 ? ScalarType::Double : ScalarType::Float;
    expect(target.has_value() != probabilities.has_value(), "either indices or probabilities");
    if (target) {
      expect(is_vector(*target, ScalarType::Long, job.rows), "a target of (rows) of int64");
      job.target = static_cast<const int64_t*>(data_of(*target));
    } else {
      const Tensor& q = *probabilities;
      expect(q.dim() == 2 && q.size(0) == job.rows && q.size(1) == job.classes, "probabilities of the shape of x");
      expect(q.size(1) <= 1 || q.stride(1) == 1, "probabilities with a contiguous last dim");
      expect(q.scalar_type() == compute || q.scalar_type() == x.scalar_type(), "probabilities of another dtype");
      job.probabilities = data_of(q);
      job.probabilities_stride = q.stride(0);
      job.wide = q.scalar_type() == compute;
    }
    if (weight) {
      expect(is_vector(*weight, compute, job.classes), "one weight per class, of the compute dtype");
      job.weight = data_of(*weight);
    }
    expect(total_classes >= first_class + job.classes && first_class >= 0, "no more classes than there are");
    job.first_class = first_class;
    job.ignore_index = ignore_index;
    job.uniform = total_classes > 0 ? smoothing / static_cast<double>(total_classes) : 0;
    job.share = 1 - smoothing;
  }

  void forward() {
    const int64_t parts = job.parts();
    if (parts > 1) of_parts_.resize(static_cast<size_t>(job.rows * parts));
    job.of_parts = of_parts_.data();
    const LossKernels& chosen = *kernels(dtype_).loss;
    share(job.items(), 1, chosen.scratch_bytes(job),
          [&](int64_t first, int64_t last, void* scratch) { chosen.forward(job, first, last, scratch); });
    torch::stable::parallel_for(0, parts > 1 ? job.rows : 0, 64, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) job.join(r);
    });
  }

  void backward() {
    const LossKernels& chosen = *kernels(dtype_).loss;
    share(job.items(), 1, chosen.scratch_bytes(job),
          [&](int64_t first, int64_t last, void* scratch) { chosen.backward(job, first, last, scratch); });
  }

  void want_sums() {
    sums_.resize(static_cast<size_t>(job.items() * 4 * job.order));
    job.sums = sums_.data();
  }

  // Adds up the items' sums in their order.
  void finish(Tensor& grad_coefs, Tensor& grad_knots) const {
    ParamGrads grads(*params_);
    for (int64_t item = 0; item < job.items(); ++item) grads.add(0, sums_.data() + item * 4 * job.order);
    grads.write(grad_coefs, grad_knots);
  }

 private:
  DType dtype_;
  std::optional<Parameters> params_;
  std::vector<double> sums_;
  std::vector<LossSums> of_parts_;
};

Tensor loss_forward(const Tensor& x, const OptionalTensor& target, const OptionalTensor& probabilities,
                    const Tensor& coefs, const Tensor& knots, const OptionalTensor& weight, double smoothing,
                    int64_t total_classes, int64_t first_class, int64_t ignore_index, bool full) {
  Loss loss(x, target, probabilities, coefs, knots, weight, smoothing, total_classes, first_class, ignore_index);
  Tensor stats = torch::stable::new_empty(x, {loss_planes, loss.job.rows}, ScalarType::Double);
  loss.job.stats = static_cast<double*>(stats.mutable_data_ptr());
  loss.job.full = full || loss.job.dense();
  loss.forward();
  return stats;
}

// Writes the gradient of x to out, which may be x. The parameters' gradients come in double, empty unless asked for.
std::tuple<Tensor, Tensor> loss_backward(const Tensor& x, const OptionalTensor& target,
                                         const OptionalTensor& probabilities, const Tensor& coefs, const Tensor& knots,
                                         const OptionalTensor& weight, double smoothing, int64_t total_classes,
                                         int64_t first_class, int64_t ignore_index, const Tensor& stats,
                                         const Tensor& scale, const Tensor& p_scale, bool params_grad, Tensor out) {
  Loss loss(x, target, probabilities, coefs, knots, weight, smoothing, total_classes, first_class, ignore_index);
  LossJob& job = loss.job;
  expect(stats.scalar_type() == ScalarType::Double && stats.is_contiguous() && stats.numel() >= 2 * job.rows,
         "the forward's results");
  expect(is_vector(scale, ScalarType::Double, job.rows) && is_vector(p_scale, ScalarType::Double, job.rows),
         "one scale per row, of float64");
  expect(
      out.dim() == 2 && out.size(0) == job.rows && out.size(1) == job.classes && out.scalar_type() == x.scalar_type(),
      "out like x");
  expect(out.size(1) <= 1 || out.stride(1) == 1, "out with a contiguous last dim");
  job.stats = static_cast<double*>(data_of(stats));
  job.scale = static_cast<const double*>(data_of(scale));
  job.p_scale = static_cast<const double*>(data_of(p_scale));
  job.out = data_of(out);
  job.out_stride = out.stride(0);
  std::vector<int64_t> shape = {0};
  if (params_grad) {
    shape.assign(coefs.sizes().begin(), coefs.sizes().end());
    loss.want_sums();
  }
  Tensor grad_coefs = torch::stable::new_empty(coefs, shape, ScalarType::Double);
  Tensor grad_knots = torch::stable::new_empty(knots, shape, ScalarType::Double);
  loss.backward();
  if (params_grad) loss.finish(grad_coefs, grad_knots);
  return {grad_coefs, grad_knots};
}

// Adds a part to a sum in the compute dtype.
void loss_add(Tensor sum, const Tensor& part) {
  DType dtype = dtype_of(part);
  ScalarType compute = dtype == DType::f64 ? ScalarType::Double : ScalarType::Float;
  expect(sum.scalar_type() == compute && sum.is_contiguous() && part.is_contiguous() && sum.numel() == part.numel(),
         "a sum of the compute dtype and as many entries, both contiguous");
  auto add = kernels(dtype).loss->add;
  const int64_t of_sum = dtype == DType::f64 ? 8 : 4;
  const int64_t of_part = dtype == DType::bf16 || dtype == DType::f16 ? 2 : of_sum;
  char* const to = static_cast<char*>(data_of(sum));
  const char* const from = static_cast<const char*>(data_of(part));
  torch::stable::parallel_for(0, sum.numel(), 1 << 15, [&](int64_t first, int64_t last) {
    add(to + first * of_sum, from + first * of_part, last - first);
  });
}

}  // namespace
}  // namespace multimax

STABLE_TORCH_LIBRARY_IMPL(multimax, CPU, m) {
  m.impl("loss_forward", TORCH_BOX(&multimax::loss_forward));
  m.impl("loss_backward", TORCH_BOX(&multimax::loss_backward));
  m.impl("loss_add", TORCH_BOX(&multimax::loss_add));
}
