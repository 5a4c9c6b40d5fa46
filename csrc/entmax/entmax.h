// Entmax along the last, contiguous dim: what one call has to do, free of torch.
//
// With u = x - max x (halved for entmax15), the weights are a power of r = max(u - tau, 0), where tau makes them sum to
// 1:
//   sparsemax y = r, entmax15 y = r^2;
// and for any alpha > 1, with a = alpha - 1, entmax y = max(a u + tau, 0)^(1 / a), or, for small a, in a form that
// holds for a near 0 too, max(1 + a (u - tau), 0)^(1 / a). What the backward needs of the forward are two numbers per
// row, max x and tau.
#pragma once

#include <cstdint>

#include "simd/isa.h"

namespace multimax {

enum class Entmax { sparsemax, entmax15, any_alpha };

struct EntmaxJob {
  Entmax kind;
  int64_t length;
  const void *x, *grad;  // (rows, length); grad in the backward only
  void* out;             // y, or the gradient of x
  void* stats;           // (rows, 2) of the compute type: max x and tau; for a row that is masked as a whole
                         // a tau that leaves nothing
  const void* alpha;     // (rows) of the compute type; any_alpha only
  void* grad_alpha;      // (rows) likewise, in the backward; null where it is not asked for
};

// The kernels of one instruction set and dtype.
struct EntmaxKernels {
  int64_t (*scratch_bytes)(const EntmaxJob&);  // that one thread needs, aligned to 64
  void (*forward)(const EntmaxJob&, int64_t first_row, int64_t last_row, void* scratch);
  void (*backward)(const EntmaxJob&, int64_t first_row, int64_t last_row, void* scratch);
};

MULTIMAX_DECLARE_DTYPES(EntmaxKernels, entmax_kernels)

}  // namespace multimax
