// The kernels of this room. Compiled once for each instruction set and dtype, with MULTIMAX_ISA and MULTIMAX_DTYPE
// naming them.
#include "entmax/entmax.h"

#include "entmax/projection.h"
#include "entmax/softmax.h"
#include "simd/scratch.h"

namespace multimax::MULTIMAX_ISA {
namespace {

// Where a row of a mask begins.
inline const unsigned char* row_of(const RowMask& mask, int64_t row) {
  const unsigned char* at = mask.data;
  for (int a = mask.axes - 1; a > 0; --a) {
    at += row % mask.sizes[a] * mask.strides[a];
    row /= mask.sizes[a];
  }
  return mask.axes == 0 ? at : at + row * mask.strides[0];
}

// A row's entries, with -inf for what a mask takes out.
inline const T* masked(const EntmaxJob& job, int64_t row, T* copy) {
  const T* x = static_cast<const T*>(job.x) + row * job.length;
  if (job.mask.data == nullptr) return x;
  const unsigned char* takes_part = row_of(job.mask, row);
  const V lowest = S::set(minus_infinity<C>());
  each(
      0, job.length, MULTIMAX_EACH {
        fetch_next(x, job.length, i);
        fetch_next(takes_part, job.length, i);
        store(copy + i, S::select(truth(takes_part + i, part), load(x + i, part), lowest), part);
      });
  return copy;
}

template <bool backward, class Law>
void project(const EntmaxJob& job, int64_t row, Row entries, T* out, C* stats, const Scratch& scratch) {
  constexpr bool any_alpha = same<Law, AnyAlpha>;
  const C parameter = any_alpha ? static_cast<const C*>(job.parameter)[row] : static_cast<C>(job.option);
  Projected<Law> projected(entries, Law(parameter));
  if constexpr (!backward) {
    projected.forward(out, stats, scratch);
  } else {
    const T* grad = static_cast<const T*>(job.grad) + row * job.length;
    if constexpr (any_alpha) {
      if (job.grad_parameter != nullptr) {
        return projected.template backward<true>(grad, stats, out, static_cast<C*>(job.grad_parameter) + row);
      }
    }
    projected.template backward<false>(grad, stats, out, nullptr);
  }
}

template <bool backward, Entmax kind>
void exponentiate(const EntmaxJob& job, int64_t row, Row entries, T* out, C* stats, const Scratch& scratch) {
  double temperature = job.option;
  if (kind == Entmax::softmax && job.parameter != nullptr) {
    temperature = static_cast<double>(static_cast<const C*>(job.parameter)[row]);
  }
  Softmax<kind> softmax(entries, job.option, temperature);
  if constexpr (!backward) {
    softmax.forward(out, stats, scratch);
  } else {
    const T* grad = static_cast<const T*>(job.grad) + row * job.length;
    const T* y = has_y ? static_cast<const T*>(job.y) + row * job.length : nullptr;
    if constexpr (kind == Entmax::softmax) {
      if (job.grad_parameter != nullptr) {
        C* grad_temperature = static_cast<C*>(job.grad_parameter) + row;
        return softmax.template backward<true>(grad, stats, y, out, grad_temperature, scratch);
      }
    }
    softmax.template backward<false>(grad, stats, y, out, nullptr, scratch);
  }
}

using OneRow = void (*)(const EntmaxJob&, int64_t, Row, T*, C*, const Scratch&);

template <bool backward>
OneRow function_of(Entmax kind) {
  switch (kind) {
    case Entmax::sparsemax:
      return project<backward, Projection<Entmax::sparsemax>>;
    case Entmax::entmax15:
      return project<backward, Projection<Entmax::entmax15>>;
    case Entmax::any_alpha:
      return project<backward, AnyAlpha>;
    case Entmax::sparsehourglass:
      return project<backward, Hourglass>;
    // where the weights are at hand, the gradient is the same for all
    case Entmax::softmax:
      return exponentiate<backward, Entmax::softmax>;
    case Entmax::evsoftmax:
      return exponentiate < backward, backward && has_y ? Entmax::topk : Entmax::evsoftmax > ;
    case Entmax::topshare:
      return exponentiate < backward, backward ? Entmax::topk : Entmax::topshare > ;
    default:
      return exponentiate<backward, Entmax::topk>;
  }
}

inline Scratch scratch_of(const EntmaxJob& job, Pieces& pieces) {
  return {pieces.take<C>(job.length + S::width), pieces.take<T>(job.length)};
}

template <bool backward>
void run(const EntmaxJob& job, int64_t first, int64_t last, void* memory) {
  Pieces pieces(memory);
  const Scratch scratch = scratch_of(job, pieces);
  const OneRow function = function_of<backward>(job.kind);
  const bool from_y = backward && has_y && job.y != nullptr;  // in which masked entries are 0
  const int64_t stats_size = stats_per_row[static_cast<int>(job.kind)];
  for (int64_t row = first; row < last; ++row) {
    const T* x = from_y ? static_cast<const T*>(job.x) + row * job.length : masked(job, row, scratch.entries);
    function(job, row, Row{x, job.length}, static_cast<T*>(job.out) + row * job.length,
             static_cast<C*>(job.stats) + stats_size * row, scratch);
  }
}

int64_t scratch_bytes(const EntmaxJob& job) {
  Pieces pieces(nullptr);
  scratch_of(job, pieces);
  return pieces.bytes;
}

}  // namespace

const EntmaxKernels MULTIMAX_OF_DTYPE(entmax_kernels) = {scratch_bytes, run<false>, run<true>};

}  // namespace multimax::MULTIMAX_ISA
