// Exact sparsemax and entmax15 along the last, contiguous dim: what one call has to do, free of torch.
//
// With u = x - max x (sparsemax) or u = (x - max x) / 2 (entmax15), both are a power of r = max(u - tau, 0):
//   sparsemax y = r, entmax15 y = r^2, with tau such that y sums to 1.
// What the backward needs of the forward are two numbers a row, max x and tau.
#pragma once

#include <cstdint>

#include "rows.h"

namespace multimax {

enum class Entmax { sparsemax, entmax15 };

struct EntmaxJob {
  Entmax kind;
  DType dtype;
  double floor;  // entries at or below count as masked
  int64_t length;
  const void *x, *grad;  // (rows, length); grad in the backward only
  void* out;             // y, or the gradient of x
  void* stats;           // (rows, 2) of the compute type: max x and tau; 0 and inf for a row that is masked as a whole
};

// One instruction set's kernels.
struct EntmaxKernels {
  int64_t (*scratch_bytes)(const EntmaxJob&);  // that one thread needs, aligned to 64
  void (*forward)(const EntmaxJob&, int64_t first_row, int64_t last_row, void* scratch);
  void (*backward)(const EntmaxJob&, int64_t first_row, int64_t last_row, void* scratch);
};

namespace baseline {
extern const EntmaxKernels entmax_kernels;
}
namespace avx2 {
extern const EntmaxKernels entmax_kernels;
}
namespace avx512 {
extern const EntmaxKernels entmax_kernels;
}
namespace avx512_bf16 {
extern const EntmaxKernels entmax_kernels;
}

}  // namespace multimax
