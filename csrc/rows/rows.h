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

  // Few long rows are split, so that several threads can share one: a block is then a stretch of an item. What is
  // measured of each is kept for the second look, (blocks, block_bytes), and what follows for the item, (items,
  // item_bytes).
  int64_t stretches;  // of an item; 1: not split
  int64_t stretch;    // entries
  void *of_blocks, *of_items;

  int64_t blocks() const { return items == 0 ? 0 : items / run_items * run_blocks; }
};

// A pass over blocks [first, last) with scratch memory; where rows are split, in three steps.
struct RowPass {
  void (*whole)(const RowJob&, int64_t first, int64_t last, void* scratch);
  void (*measure)(const RowJob&, int64_t first, int64_t last, void* scratch);
  void (*join)(const RowJob&, int64_t first_item, int64_t last_item);
  void (*finish)(const RowJob&, int64_t first, int64_t last, void* scratch);
};

// The kernels of one instruction set and dtype.
struct RowKernels {
  int64_t width;                            // lanes of a vector
  int64_t short_length;                     // rows of up to this length are quicker as columns, if copied
  int64_t stretch;                          // vectors
  int64_t block_bytes, item_bytes;          // multiples of 64
  int64_t (*scratch_bytes)(const RowJob&);  // that one thread needs, aligned to 64
  RowPass forward, backward;
};

// Items to blocks, and rows to stretches where they are few and long. By the shapes alone, for results follow from it.
inline void divide(RowJob& job, const RowKernels& kernels) {
  constexpr int64_t few = 64;  // rows
  // large enough that finishing a block's sums costs nothing, small enough to share evenly
  constexpr int64_t block_entries = 12288;
  const int64_t entries = job.length * (job.columns ? kernels.width : 1);
  const int64_t stretch = kernels.stretch * (job.columns ? 1 : kernels.width);
  const bool split = job.items > 0 && job.items < few && job.length > stretch;
  job.stretches = split ? (job.length + stretch - 1) / stretch : 1;
  job.stretch = stretch;
  job.block_items = split || entries >= block_entries ? 1 : block_entries / (entries > 0 ? entries : 1);
  job.run_blocks = (job.run_items + job.block_items - 1) / job.block_items * job.stretches;
}

MULTIMAX_DECLARE_DTYPES(RowKernels, row_kernels)

}  // namespace multimax
