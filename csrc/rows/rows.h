// The row functions multimax, log_multimax and modulate: what one call has to do, free of torch.
//
// A row is a line of `length` entries along the reduced dim. Rows are handled in items: one row (its entries side by
// side in vectors), or, where the reduced dim is not contiguous but another axis is, a vector's width of neighbouring
// rows at once (one row per lane). Items are grouped into blocks; a block never crosses from one set of parameters to
// the next, and its sums are written to a place of its own, so results do not depend on how threads share the blocks.
#pragma once

#include <cstdint>

#include "simd/isa.h"

namespace multimax {

enum class Kind { multimax, log_multimax, modulate };

inline constexpr int max_axes = 64;  // torch's own limit

// A tensor seen along the reduced dim, the lanes and the remaining axes; strides in elements.
struct Operand {
  void* data = nullptr;
  int64_t length_stride = 0;
  int64_t lane_stride = 0;
  int64_t strides[max_axes] = {};
};

struct RowJob {
  Kind kind;
  int order;

  int64_t length;
  int64_t lanes;  // rows along the lane axis (1 if rows are handled one by one)
  bool columns;
  int axes;  // the other axes, outermost first
  int64_t sizes[max_axes];

  Operand x, mask, out;  // out: y forward, the gradient of x backward
  Operand grad;          // backward only
  // What the backward needs of the forward's result. In single and double precision that is y. In half precision y is
  // too coarse; there the weights are found again from the row's statistics, of the compute type: its largest sigma
  // and, stats_plane elements further, 1 / the sum of exp(sigma - largest) (log_multimax: the log of that sum).
  Operand y, stats;
  int64_t stats_plane;

  const void* params;             // (sets, 4, order) of the compute type: lower, upper coefs, lower, upper knots
  int64_t set_strides[max_axes];  // which set belongs to which item
  double* sums;                   // (blocks, 4 order), backward; null where the parameters need no gradient

  int64_t items, block_items;  // block k of a run holds its items from k * block_items on
  int64_t run_items, run_blocks;

  int64_t blocks() const { return items == 0 ? 0 : items / run_items * run_blocks; }
};

// The kernels of one instruction set and dtype.
struct RowKernels {
  int64_t width;                            // lanes of a vector
  int64_t short_length;                     // rows of up to this length are quicker as columns, if copied
  int64_t (*scratch_bytes)(const RowJob&);  // that one thread needs, aligned to 64
  void (*forward)(const RowJob&, int64_t first_block, int64_t last_block, void* scratch);
  void (*backward)(const RowJob&, int64_t first_block, int64_t last_block, void* scratch);
};

MULTIMAX_DECLARE_DTYPES(RowKernels, row_kernels)

}  // namespace multimax
