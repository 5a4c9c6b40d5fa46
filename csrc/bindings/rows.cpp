// The row functions on torch's stable ABI: lay out the work, share it over torch's threads, finish the sums.

#include <algorithm>
#include <optional>
#include <tuple>

#include "bindings/bindings.h"

namespace multimax {
namespace {

// A job together with the memory it points to.
class Plan {
 public:
  RowJob job{};

  Plan(const RowKernels& kernels, Kind kind, const Tensor& x, const Tensor& coefs, const Tensor& knots,
       const std::optional<Tensor>& mask, int64_t dim, const Tensor* y, const Tensor* stats, const Tensor* grad,
       const Tensor& out) {
    int64_t ndim = x.dim();
    int64_t outer = std::max<int64_t>(ndim - 1, 0);
    STD_TORCH_CHECK(ndim <= max_axes, "multimax: expected at most ", max_axes, " dims, got ", ndim);
    STD_TORCH_CHECK(dim >= 0 && dim < std::max<int64_t>(ndim, 1), "multimax: dim out of range");
    int64_t lead = coefs.dim() - 2;
    STD_TORCH_CHECK(lead == 0 || lead == outer, "multimax: coefs do not fit the input");
    STD_TORCH_CHECK(coefs.size(lead + 1) == 2 && coefs.size(lead) >= 1, "multimax: coefs do not end in (order, 2)");
    same_shape(coefs, knots, "knots");
    if (mask) same_shape(x, *mask, "mask");
    if (mask) STD_TORCH_CHECK(mask->scalar_type() == ScalarType::Bool, "multimax: expected a boolean mask");
    for (const Tensor* t : {y, grad}) {
      if (t == nullptr) continue;
      same_shape(x, *t, "grad or output");
      STD_TORCH_CHECK(dtype_of(*t) == dtype_of(x), "multimax: grad or output is of another dtype than the input");
    }

    params_.emplace(coefs, knots, dtype_of(x));
    job.kind = kind;
    job.order = static_cast<int>(params_->order());
    job.params = params_->data();
    job.length = ndim == 0 ? 1 : x.size(dim);

    // strides of every operand on every axis but dim
    std::vector<Axis> axes;
    int64_t rows = 1, sets = 1;
    for (int64_t a = ndim - 1, i = outer - 1; a >= 0; --a) {
      if (a == dim) continue;
      Axis axis;
      axis.size = x.size(a);
      axis.x = x.stride(a);
      axis.out = out.stride(a);
      axis.grad = grad ? grad->stride(a) : 0;
      axis.mask = mask ? mask->stride(a) : 0;
      axis.y = y ? y->stride(a) : 0;
      axis.stats = rows;
      axis.set = 0;
      if (lead != 0) {
        STD_TORCH_CHECK(coefs.size(i) == 1 || coefs.size(i) == axis.size, "multimax: coefs do not fit the input");
        if (coefs.size(i) != 1) axis.set = sets;
        sets *= coefs.size(i);
      }
      --i;
      rows *= axis.size;
      axes.insert(axes.begin(), axis);
    }
    if (stats) {
      STD_TORCH_CHECK(stats->numel() == 2 * rows && stats->is_contiguous() && dtype_of(*stats) == DType::f32,
                      "multimax: stats do not fit the input");
      job.stats.data = data_of(*stats);
      job.stats_plane = rows;
    }
    bind(job.x, x, dim, ndim);
    bind(job.out, out, dim, ndim);
    if (y) bind(job.y, *y, dim, ndim);
    if (grad) bind(job.grad, *grad, dim, ndim);
    if (mask) bind(job.mask, *mask, dim, ndim);

    // A vector's width of neighbouring rows at once: where entries lie apart and those of the neighbours side by side,
    // or where rows are so short that what has to be done once for each would count most.
    job.lanes = 1;
    auto as_lanes = [&](const Axis axis) {
      job.columns = true;
      job.lanes = axis.size;
      job.x.lane_stride = axis.x;
      job.out.lane_stride = axis.out;
      job.grad.lane_stride = axis.grad;
      job.mask.lane_stride = axis.mask;
      job.y.lane_stride = axis.y;
      job.stats.lane_stride = axis.stats;
    };
    if (job.length > 1 && job.x.length_stride != 1) {
      for (size_t a = 0; a < axes.size() && !job.columns; ++a) {
        if (axes[a].size > 1 && axes[a].x == 1 && axes[a].out == 1 && axes[a].set == 0) {
          as_lanes(axes[a]);
          axes.erase(axes.begin() + static_cast<std::ptrdiff_t>(a));
        }
      }
    }
    merge(axes);
    // even if there are too few for a vector: a row's weights are the same beside any others
    if (!job.columns && job.length > 1 && job.length <= kernels.short_length) {
      if (axes.empty()) {
        as_lanes({1, 0, 0, 0, 0, 0, 0, 0});
      } else if (axes.back().set == 0) {
        as_lanes(axes.back());
        axes.pop_back();
      }
    }
    job.axes = static_cast<int>(axes.size());
    for (size_t a = 0; a < axes.size(); ++a) {
      job.sizes[a] = axes[a].size;
      job.x.strides[a] = axes[a].x;
      job.out.strides[a] = axes[a].out;
      job.grad.strides[a] = axes[a].grad;
      job.mask.strides[a] = axes[a].mask;
      job.y.strides[a] = axes[a].y;
      job.stats.strides[a] = axes[a].stats;
      job.set_strides[a] = axes[a].set;
    }

    int64_t width = job.columns ? kernels.width : 1;
    int64_t lane_items = (job.lanes + width - 1) / width;
    job.run_items = lane_items;
    run_axes_ = axes.size();
    while (run_axes_ > 0 && axes[run_axes_ - 1].set == 0) job.run_items *= axes[--run_axes_].size;
    job.items = lane_items;
    for (const Axis& axis : axes) job.items *= axis.size;
    if (rows == 0 || job.length == 0) job.items = 0;
    divide(job, kernels);
  }

  void run(const RowKernels& kernels, bool backward) {
    const RowPass& pass = backward ? kernels.backward : kernels.forward;
    const int64_t scratch_bytes = kernels.scratch_bytes(job);
    constexpr int64_t grain = 2;  // blocks: as much work as torch gives a thread at least
    auto step = [&](auto kernel) {
      share(job.blocks(), grain, scratch_bytes,
            [&](int64_t first, int64_t last, void* scratch) { kernel(job, first, last, scratch); });
    };
    if (job.stretches == 1) return step(pass.whole);
    const Scratch of_blocks(job.blocks() * kernels.block_bytes), of_items(job.items * kernels.item_bytes);
    job.of_blocks = of_blocks.get();
    job.of_items = of_items.get();
    if (job.items >= 2 * torch::stable::get_num_threads()) {  // the second look finds a row in the cache
      return share(job.items, 1, scratch_bytes, [&](int64_t first, int64_t last, void* scratch) {
        for (int64_t item = first; item < last; ++item) {
          pass.measure(job, item * job.stretches, (item + 1) * job.stretches, scratch);
          pass.join(job, item, item + 1);
          pass.finish(job, item * job.stretches, (item + 1) * job.stretches, scratch);
        }
      });
    }
    step(pass.measure);
    pass.join(job, 0, job.items);
    step(pass.finish);
  }

  void want_sums() {
    sums_.resize(static_cast<size_t>(job.blocks() * 4 * job.order));
    job.sums = sums_.data();
  }

  // Adds up the blocks' sums in their order and applies the factors that do not depend on x.
  void finish(Tensor& grad_coefs, Tensor& grad_knots) const {
    ParamGrads grads(*params_);
    for (int64_t block = 0; block < job.blocks(); ++block) {
      grads.add(set_of_run(block / job.run_blocks), sums_.data() + block * 4 * job.order);
    }
    grads.write(grad_coefs, grad_knots);
  }

 private:
  struct Axis {
    int64_t size, x, out, y, grad, mask, stats, set;
  };

  std::optional<Parameters> params_;
  std::vector<double> sums_;
  size_t run_axes_ = 0;  // the axes along which the set of parameters changes

  static void same_shape(const Tensor& a, const Tensor& b, const char* name) {
    bool same = a.dim() == b.dim();
    for (int64_t i = 0; same && i < a.dim(); ++i) same = a.size(i) == b.size(i);
    STD_TORCH_CHECK(same, "multimax: ", name, " does not have the expected shape");
  }

  static void bind(Operand& operand, const Tensor& t, int64_t dim, int64_t ndim) {
    operand.data = data_of(t);
    operand.length_stride = ndim == 0 ? 1 : t.stride(dim);
  }

  static void merge(std::vector<Axis>& axes) {
    std::vector<Axis> merged;
    for (const Axis& b : axes) {
      if (b.size == 1) continue;
      if (!merged.empty()) {
        Axis& a = merged.back();
        if (a.x == b.x * b.size && a.out == b.out * b.size && a.y == b.y * b.size && a.grad == b.grad * b.size &&
            a.stats == b.stats * b.size && a.mask == b.mask * b.size && a.set == b.set * b.size) {
          a = {a.size * b.size, b.x, b.out, b.y, b.grad, b.mask, b.stats, b.set};
          continue;
        }
      }
      merged.push_back(b);
    }
    axes = merged;
  }

  int64_t set_of_run(int64_t run) const {
    int64_t set = 0;
    for (size_t a = run_axes_; a-- > 0;) {
      set += run % job.sizes[a] * job.set_strides[a];
      run /= job.sizes[a];
    }
    return set;
  }
};

Kind kind_of(int64_t kind) {
  STD_TORCH_CHECK(kind >= 0 && kind <= 2, "multimax: unknown kind ", kind);
  return static_cast<Kind>(kind);
}

bool half_precision(const Tensor& x) { return dtype_of(x) == DType::bf16 || dtype_of(x) == DType::f16; }

// The output, and, in half precision and but for modulate, the rows' statistics: (2, *x's shape without dim).
std::tuple<Tensor, Tensor> rows_forward(const Tensor& x, const Tensor& coefs, const Tensor& knots,
                                        const std::optional<Tensor>& mask, int64_t dim, int64_t kind) {
  Kind k = kind_of(kind);
  bool with_stats = half_precision(x) && k != Kind::modulate;
  std::vector<int64_t> shape = {0};
  if (with_stats) {
    shape = {2};
    for (int64_t a = 0; a < x.dim(); ++a) {
      if (a != dim) shape.push_back(x.size(a));
    }
  }
  Tensor stats = torch::stable::new_empty(x, shape, ScalarType::Float);
  Tensor out = torch::stable::empty_like(x);
  const RowKernels& chosen = *kernels(dtype_of(x)).rows;
  Plan plan(chosen, k, x, coefs, knots, mask, dim, nullptr, with_stats ? &stats : nullptr, nullptr, out);
  plan.run(chosen, false);
  return {out, stats};
}

// `saved` is the forward's statistics in half precision, its output otherwise; modulate does without. The gradients of
// the parameters are empty unless asked for.
std::tuple<Tensor, Tensor, Tensor> rows_backward(const Tensor& grad, const Tensor& x,
                                                 const std::optional<Tensor>& saved, const Tensor& coefs,
                                                 const Tensor& knots, const std::optional<Tensor>& mask, int64_t dim,
                                                 int64_t kind, bool params_grad) {
  Kind k = kind_of(kind);
  STD_TORCH_CHECK(k == Kind::modulate || saved.has_value(), "multimax: this backward needs the forward's result");
  const Tensor* needed = k == Kind::modulate ? nullptr : &*saved;
  std::vector<int64_t> shape = {0};
  if (params_grad) shape.assign(coefs.sizes().begin(), coefs.sizes().end());
  Tensor grad_coefs = torch::stable::new_empty(coefs, shape);
  Tensor grad_knots = torch::stable::new_empty(knots, shape);
  Tensor out = torch::stable::empty_like(x);
  bool half = half_precision(x);
  const RowKernels& chosen = *kernels(dtype_of(x)).rows;
  Plan plan(chosen, k, x, coefs, knots, mask, dim, half ? nullptr : needed, half ? needed : nullptr, &grad, out);
  if (params_grad) plan.want_sums();
  plan.run(chosen, true);
  if (params_grad) plan.finish(grad_coefs, grad_knots);
  return {out, grad_coefs, grad_knots};
}

}  // namespace
}  // namespace multimax

STABLE_TORCH_LIBRARY_IMPL(multimax, CPU, m) {
  m.impl("rows_forward", TORCH_BOX(&multimax::rows_forward));
  m.impl("rows_backward", TORCH_BOX(&multimax::rows_backward));
}
