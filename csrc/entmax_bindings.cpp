// sparsemax and entmax15 on torch's stable ABI: rows shared over torch's threads.

#include <algorithm>
#include <tuple>

#include "bindings.h"
#include "entmax.h"

namespace multimax {
namespace {

EntmaxJob job_of(const Tensor& x, const Tensor& stats, const Tensor& out, int64_t kind) {
  STD_TORCH_CHECK(kind == 0 || kind == 1, "multimax: unknown kind ", kind);
  STD_TORCH_CHECK(x.dim() >= 1 && x.is_contiguous(), "multimax: expected a contiguous input of at least one dim");
  EntmaxJob job{};
  job.kind = static_cast<Entmax>(kind);
  job.dtype = dtype_of(x);
  job.floor = floor_of(job.dtype);
  job.length = x.size(x.dim() - 1);
  job.x = data_of(x);
  job.out = data_of(out);
  job.stats = data_of(stats);
  return job;
}

void run(const EntmaxJob& job, int64_t entries, bool backward) {
  if (entries == 0) return;
  const EntmaxKernels& chosen = *kernels().entmax;
  auto kernel = backward ? chosen.backward : chosen.forward;
  constexpr int64_t grain = 32768;  // entries: as much work as torch gives a thread at least
  share(entries / job.length, std::max<int64_t>(grain / job.length, 1), chosen.scratch_bytes(job),
        [&](int64_t first, int64_t last, void* scratch) { kernel(job, first, last, scratch); });
}

ScalarType compute_type(const Tensor& x) { return dtype_of(x) == DType::f64 ? ScalarType::Double : ScalarType::Float; }

// The output, and (*x's shape but the last dim, 2) of what the backward needs.
std::tuple<Tensor, Tensor> entmax_forward(const Tensor& x, int64_t kind) {
  STD_TORCH_CHECK(x.dim() >= 1, "multimax: expected an input of at least one dim");
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = 2;
  Tensor stats = torch::stable::new_empty(x, shape, compute_type(x));
  Tensor out = torch::stable::empty_like(x);
  run(job_of(x, stats, out, kind), x.numel(), false);
  return {out, stats};
}

Tensor entmax_backward(const Tensor& grad, const Tensor& x, const Tensor& stats, int64_t kind) {
  Tensor out = torch::stable::empty_like(x);
  EntmaxJob job = job_of(x, stats, out, kind);
  STD_TORCH_CHECK(grad.numel() == x.numel() && grad.is_contiguous() && dtype_of(grad) == job.dtype,
                  "multimax: grad does not fit the input");
  STD_TORCH_CHECK(job.length == 0 || (stats.numel() * job.length == 2 * x.numel() && stats.is_contiguous()),
                  "multimax: stats do not fit the input");
  STD_TORCH_CHECK(stats.scalar_type() == compute_type(x), "multimax: stats do not fit the input");
  job.grad = data_of(grad);
  run(job, x.numel(), true);
  return out;
}

}  // namespace
}  // namespace multimax

STABLE_TORCH_LIBRARY_FRAGMENT(multimax, m) {
  m.def("entmax_forward(Tensor x, int kind) -> (Tensor, Tensor)");
  m.def("entmax_backward(Tensor grad, Tensor x, Tensor stats, int kind) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(multimax, CPU, m) {
  m.impl("entmax_forward", TORCH_BOX(&multimax::entmax_forward));
  m.impl("entmax_backward", TORCH_BOX(&multimax::entmax_backward));
}
