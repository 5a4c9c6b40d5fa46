// The functions of the field along the last, contiguous dim: what one call has to do, free of torch.
//
// Projections, with u = x - max x (halved for entmax15): the weights are a power of r = max(u - tau, 0), where tau
// makes them sum to 1:
//   sparsemax y = r, entmax15 y = r^2;
// and for any alpha > 1, with a = alpha - 1, entmax y = max(a u + tau, 0)^(1 / a), or, for small a, in a form that
// holds for a near 0 too, max(1 + a (u - tau), 0)^(1 / a). Sparsehourglass is sparsemax with a factor before u. What
// the backward needs of the forward are a few numbers per row.
//
// Softmax of some entries: of all, at a temperature; of those at or above the mean (Ev-SoftMax); of the largest. Their
// backward needs the weights alone, and in half precision finds them again from x and four numbers per row.
#pragma once

#include <cstdint>

#include "simd/isa.h"

namespace multimax {

enum class Entmax { sparsemax, entmax15, any_alpha, sparsehourglass, softmax, evsoftmax, topk, topshare };
inline constexpr int64_t entmax_kinds = 8;
inline constexpr int64_t stats_per_row[entmax_kinds] = {2, 2, 2, 4, 4, 4, 4, 4};

// A boolean mask whose rows lie anywhere; strides in elements.
struct RowMask {
  static constexpr int max_axes = 64;  // torch's own limit

  const unsigned char* data;  // null: everything takes part
  int axes;                   // of the rows, outermost first
  int64_t sizes[max_axes], strides[max_axes];
};

struct EntmaxJob {
  Entmax kind;
  double option;  // sparsehourglass: 1 / q; softmax: the temperature; evsoftmax: eps; topk, topshare: how many
  int64_t length;
  const void *x, *grad;  // (rows, length); grad in the backward only
  const void* y;         // what the forward gave; backward of what is softmax, and not in half precision
  RowMask mask;
  void* out;              // y, or the gradient of x
  void* stats;            // (rows, stats_per_row) of the compute type: max x and tau, for a row that is masked as a
                          // whole a tau that leaves nothing; sparsehourglass: also the factor and its slope;
                          // what is softmax: max x, 1 / the sum, and which entries it is of
  const void* parameter;  // (rows) of the compute type: any_alpha's alpha, softmax's temperature or null
  void* grad_parameter;   // (rows) likewise, in the backward; null where it is not asked for
};

// The kernels of one instruction set and dtype.
struct EntmaxKernels {
  int64_t (*scratch_bytes)(const EntmaxJob&);  // that one thread needs, aligned to 64
  void (*forward)(const EntmaxJob&, int64_t first_row, int64_t last_row, void* scratch);
  void (*backward)(const EntmaxJob&, int64_t first_row, int64_t last_row, void* scratch);
};

MULTIMAX_DECLARE_DTYPES(EntmaxKernels, entmax_kernels)

}  // namespace multimax
