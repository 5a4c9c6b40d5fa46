// Entmax on torch's stable ABI: rows shared over torch's threads.

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>

#include "bindings/bindings.h"

namespace multimax {
namespace {

ScalarType compute_type(const Tensor& x) { return dtype_of(x) == DType::f64 ? ScalarType::Double : ScalarType::Float; }

// Rows of no entries have numbers beside them all the same.
void zero(const Tensor& t) {
  if (t.numel() != 0) std::memset(data_of(t), 0, static_cast<size_t>(t.numel()) * t.element_size());
}

// Numbers beside the rows: so many for each.
void* beside(const Tensor& t, const Tensor& x, int64_t each, const char* name) {
  int64_t length = x.size(x.dim() - 1);
  bool fits = t.is_contiguous() && t.scalar_type() == compute_type(x) &&
              (length == 0 || t.numel() * length == each * x.numel());
  STD_TORCH_CHECK(fits, "multimax: ", name, " does not fit the input");
  return data_of(t);
}

EntmaxJob job_of(const Tensor& x, const std::optional<Tensor>& alpha, const Tensor& stats, const Tensor& out,
                 int64_t kind) {
  STD_TORCH_CHECK(kind >= 0 && kind <= 2, "multimax: unknown kind ", kind);
  STD_TORCH_CHECK(x.dim() >= 1 && x.is_contiguous(), "multimax: expected a contiguous input of at least one dim");
  EntmaxJob job{};
  job.kind = static_cast<Entmax>(kind);
  job.length = x.size(x.dim() - 1);
  job.x = data_of(x);
  job.out = data_of(out);
  job.stats = beside(stats, x, 2, "stats");
  STD_TORCH_CHECK(alpha.has_value() == (job.kind == Entmax::any_alpha), "multimax: alpha does not fit the kind");
  if (alpha) job.alpha = beside(*alpha, x, 1, "alpha");
  return job;
}

void run(const EntmaxJob& job, const Tensor& x, bool backward) {
  if (x.numel() == 0) return;
  const EntmaxKernels& chosen = *kernels(dtype_of(x)).entmax;
  auto kernel = backward ? chosen.backward : chosen.forward;
  constexpr int64_t grain = 32768;  // entries: as much work as torch gives a thread at least
  share(x.numel() / job.length, std::max<int64_t>(grain / job.length, 1), chosen.scratch_bytes(job),
        [&](int64_t first, int64_t last, void* scratch) { kernel(job, first, last, scratch); });
}

// The output, and (*x's shape but the last dim, 2) of what the backward needs.
std::tuple<Tensor, Tensor> entmax_forward(const Tensor& x, const std::optional<Tensor>& alpha, int64_t kind) {
  STD_TORCH_CHECK(x.dim() >= 1, "multimax: expected an input of at least one dim");
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = 2;
  Tensor stats = torch::stable::new_empty(x, shape, compute_type(x));
  Tensor out = torch::stable::empty_like(x);
  if (x.numel() == 0) zero(stats);
  run(job_of(x, alpha, stats, out, kind), x, false);
  return {out, stats};
}

// The gradients of x and, empty unless asked for, of the rows' alphas.
std::tuple<Tensor, Tensor> entmax_backward(const Tensor& grad, const Tensor& x, const Tensor& stats,
                                           const std::optional<Tensor>& alpha, int64_t kind, bool alpha_grad) {
  Tensor out = torch::stable::empty_like(x);
  EntmaxJob job = job_of(x, alpha, stats, out, kind);
  STD_TORCH_CHECK(grad.numel() == x.numel() && grad.is_contiguous() && grad.scalar_type() == x.scalar_type(),
                  "multimax: grad does not fit the input");
  STD_TORCH_CHECK(!alpha_grad || alpha.has_value(), "multimax: there is no alpha to give a gradient to");
  job.grad = data_of(grad);
  std::vector<int64_t> shape = {0};
  if (alpha_grad) shape.assign(alpha->sizes().begin(), alpha->sizes().end());
  Tensor grad_alpha = torch::stable::new_empty(x, shape, compute_type(x));
  if (alpha_grad) job.grad_alpha = data_of(grad_alpha);
  if (x.numel() == 0) zero(grad_alpha);
  run(job, x, true);
  return {out, grad_alpha};
}

}  // namespace
}  // namespace multimax

STABLE_TORCH_LIBRARY_IMPL(multimax, CPU, m) {
  m.impl("entmax_forward", TORCH_BOX(&multimax::entmax_forward));
  m.impl("entmax_backward", TORCH_BOX(&multimax::entmax_backward));
}
