// The functions of the field on torch's stable ABI: rows shared over torch's threads.

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

// A mask whose entries lie side by side in each row, if not the rows themselves.
std::optional<Tensor> side_by_side(const std::optional<Tensor>& mask) {
  bool copy = mask && mask->dim() > 0 && mask->size(mask->dim() - 1) > 1 && mask->stride(mask->dim() - 1) != 1;
  return copy ? torch::stable::contiguous(*mask) : mask;
}

RowMask mask_of(const Tensor& mask, const Tensor& x) {
  int64_t outer = x.dim() - 1;
  bool fits = mask.scalar_type() == ScalarType::Bool && mask.dim() == x.dim() && outer <= RowMask::max_axes;
  for (int64_t a = 0; fits && a <= outer; ++a) fits = mask.size(a) == x.size(a);
  STD_TORCH_CHECK(fits, "multimax: the mask does not fit the input");
  RowMask rows{static_cast<const unsigned char*>(data_of(mask)), 0, {}, {}};
  for (int64_t a = 0; a < outer; ++a) {
    if (mask.size(a) == 1) continue;
    if (rows.axes > 0 && rows.strides[rows.axes - 1] == mask.size(a) * mask.stride(a)) {
      rows.sizes[rows.axes - 1] *= mask.size(a);  // one axis, as far as offsets go
      rows.strides[rows.axes - 1] = mask.stride(a);
    } else {
      rows.sizes[rows.axes] = mask.size(a);
      rows.strides[rows.axes++] = mask.stride(a);
    }
  }
  return rows;
}

EntmaxJob job_of(const Tensor& x, const std::optional<Tensor>& parameter, const std::optional<Tensor>& mask,
                 const Tensor& stats, const Tensor& out, Entmax kind, double option) {
  STD_TORCH_CHECK(x.is_contiguous(), "multimax: expected a contiguous input");
  EntmaxJob job{};
  job.kind = kind;
  job.option = option;
  job.length = x.size(x.dim() - 1);
  job.x = data_of(x);
  job.out = data_of(out);
  job.stats = beside(stats, x, stats_per_row[static_cast<int>(kind)], "stats");
  bool fits = parameter.has_value() ? kind == Entmax::any_alpha || kind == Entmax::softmax : kind != Entmax::any_alpha;
  STD_TORCH_CHECK(fits, "multimax: the parameter does not fit the kind");
  if (parameter) job.parameter = beside(*parameter, x, 1, "the parameter");
  if (mask) job.mask = mask_of(*mask, x);
  return job;
}

Entmax kind_of(const Tensor& x, int64_t kind) {
  STD_TORCH_CHECK(kind >= 0 && kind < entmax_kinds, "multimax: unknown kind ", kind);
  STD_TORCH_CHECK(x.dim() >= 1, "multimax: expected an input of at least one dim");
  return static_cast<Entmax>(kind);
}

void run(const EntmaxJob& job, const Tensor& x, bool backward) {
  if (x.numel() == 0) return;
  const EntmaxKernels& chosen = *kernels(dtype_of(x)).entmax;
  auto kernel = backward ? chosen.backward : chosen.forward;
  constexpr int64_t grain = 32768;  // entries: as much work as torch gives a thread at least
  share(x.numel() / job.length, std::max<int64_t>(grain / job.length, 1), chosen.scratch_bytes(job),
        [&](int64_t first, int64_t last, void* scratch) { kernel(job, first, last, scratch); });
}

// The output, and (*x's shape but the last dim, a few) of what the backward needs.
std::tuple<Tensor, Tensor> entmax_forward(const Tensor& x, const std::optional<Tensor>& parameter,
                                          const std::optional<Tensor>& given_mask, int64_t kind, double option) {
  Entmax k = kind_of(x, kind);
  const std::optional<Tensor> mask = side_by_side(given_mask);
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = stats_per_row[kind];
  Tensor stats = torch::stable::new_empty(x, shape, compute_type(x));
  Tensor out = torch::stable::empty_like(x);
  if (x.numel() == 0) zero(stats);
  run(job_of(x, parameter, mask, stats, out, k, option), x, false);
  return {out, stats};
}

// The gradients of x and, empty unless asked for, of the rows' parameters. What is softmax needs the forward's output,
// but for half precision, where that has been rounded.
std::tuple<Tensor, Tensor> entmax_backward(const Tensor& grad, const Tensor& x, const std::optional<Tensor>& y,
                                           const Tensor& stats, const std::optional<Tensor>& parameter,
                                           const std::optional<Tensor>& given_mask, int64_t kind, double option,
                                           bool parameter_grad) {
  Entmax k = kind_of(x, kind);
  const std::optional<Tensor> mask = side_by_side(given_mask);
  Tensor out = torch::stable::empty_like(x);
  EntmaxJob job = job_of(x, parameter, mask, stats, out, k, option);
  auto like_x = [&](const Tensor& t) {
    return t.numel() == x.numel() && t.is_contiguous() && t.scalar_type() == x.scalar_type();
  };
  STD_TORCH_CHECK(like_x(grad), "multimax: grad does not fit the input");
  bool from_y = k >= Entmax::softmax && x.scalar_type() == compute_type(x);
  STD_TORCH_CHECK(from_y == y.has_value() && (!from_y || like_x(*y)), "multimax: the output does not fit the input");
  STD_TORCH_CHECK(!parameter_grad || parameter.has_value(), "multimax: there is no parameter to give a gradient to");
  job.grad = data_of(grad);
  if (y) job.y = data_of(*y);
  std::vector<int64_t> shape = {0};
  if (parameter_grad) shape.assign(parameter->sizes().begin(), parameter->sizes().end());
  Tensor grad_parameter = torch::stable::new_empty(x, shape, compute_type(x));
  if (parameter_grad) job.grad_parameter = data_of(grad_parameter);
  if (x.numel() == 0) zero(grad_parameter);
  run(job, x, true);
  return {out, grad_parameter};
}

}  // namespace
}  // namespace multimax

STABLE_TORCH_LIBRARY_IMPL(multimax, CPU, m) {
  m.impl("entmax_forward", TORCH_BOX(&multimax::entmax_forward));
  m.impl("entmax_backward", TORCH_BOX(&multimax::entmax_backward));
}
