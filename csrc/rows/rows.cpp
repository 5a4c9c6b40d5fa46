// The row kernels. Compiled once for each instruction set and dtype, with MULTIMAX_ISA and MULTIMAX_DTYPE naming them.
#include "rows/rows.h"

#include "rows/backward.h"
#include "rows/forward.h"
#include "rows/layout.h"

namespace multimax::MULTIMAX_ISA {
namespace {

// A block's set of parameters, and the sums behind their gradients.
struct BlockParams {
  Params<C> params, slopes;
  ParamSums<S> sums;

  BlockParams(const RowJob& job, const Position& at, const Scratch& scratch)
      : sums{scratch.sums, scratch.folded, 0, job.order} {
    const C* set = static_cast<const C*>(job.params) + at.offset(job, job.set_strides) * 4 * job.order;
    const C *b = set + 2 * job.order, *d = set + 3 * job.order;
    for (int i = 0; i < 2 * job.order; ++i) scratch.slopes[i] = set[i] * static_cast<C>(i % job.order + 1);
    params = {job.order, set, set + job.order, b, d};
    slopes = {job.order, scratch.slopes, scratch.slopes + job.order, b, d};
    if (job.sums != nullptr) sums.clear();
  }
};

// Calls pass(tiles, rows, scratch, block) for the items of each block, a batch of rows at a time.
template <class Pass>
MULTIMAX_INLINE void run_blocks(const RowJob& job, int64_t first, int64_t last, void* memory, Pass pass) {
  const Scratch scratch(job, memory);
  for (int64_t block = first; block < last; ++block) {
    int64_t item = block / job.run_blocks * job.run_items + block % job.run_blocks * job.block_items;
    int64_t end = min(item + job.block_items, (block / job.run_blocks + 1) * job.run_items);
    Position at;
    at.seek(job, item, S::width);
    BlockParams params(job, at, scratch);
    while (item < end) {
      Tile tiles[batch_rows];
      int rows = static_cast<int>(min(scratch.batch, end - item));
      item += rows;
      for (int r = 0; r < rows; ++r, at.next(job, S::width)) lay_out(job, at, scratch, r, tiles[r]);
      pass(tiles, rows, scratch, params);
      for (int r = 0; r < rows; ++r) deliver(job, tiles[r]);
    }
    if (job.sums != nullptr) params.sums.total(job.sums + block * 4 * job.order);
  }
}

// Calls pass(tile, block, item, params) for stretches of items.
template <class Pass>
MULTIMAX_INLINE void run_stretches(const RowJob& job, int64_t first, int64_t last, void* memory, Pass pass) {
  const Scratch scratch(job, memory);
  for (int64_t block = first; block < last; ++block) {
    Position at;
    at.seek(job, block / job.stretches, S::width);
    at.begin = block % job.stretches * job.stretch;
    at.length = min(job.stretch, job.length - at.begin);
    BlockParams params(job, at, scratch);
    Tile tile;
    lay_out(job, at, scratch, 0, tile);
    pass(tile, block, params);
  }
}

template <class F>
MULTIMAX_INLINE void with_kind(Kind kind, F f) {
  if (kind == Kind::multimax) return f.template operator()<Kind::multimax>();
  if (kind == Kind::log_multimax) return f.template operator()<Kind::log_multimax>();
  f.template operator()<Kind::modulate>();
}

auto modulate_only_of(const Params<C>& params) {
  return with_order(params.order, []<int N>() { return modulate_only<N>; });
}

void forward(const RowJob& job, int64_t first, int64_t last, void* memory) {
  with_kind(job.kind, [&]<Kind kind>() {
    run_blocks(job, first, last, memory, [](const Tile* tiles, int rows, const Scratch& scratch, BlockParams& block) {
      if constexpr (kind == Kind::modulate) {
        for (int r = 0; r < rows; ++r) modulate_only_of(block.params)(tiles[r], block.params);
      } else {
        forward_of<kind>(block.params).run(tiles, rows, scratch.measured);
      }
    });
  });
}

void measure_forward(const RowJob& job, int64_t first, int64_t last, void* memory) {
  Measured* found = static_cast<Measured*>(job.of_blocks);
  with_kind(job.kind, [&]<Kind kind>() {
    if constexpr (kind != Kind::modulate) {
      run_stretches(job, first, last, memory, [&](const Tile& tile, int64_t block, BlockParams& params) {
        forward_of<kind>(params.params).measure(tile, found[block]);
      });
    }
  });
}

void join_forward(const RowJob& job, int64_t first, int64_t last) {
  const Measured* found = static_cast<const Measured*>(job.of_blocks);
  with_kind(job.kind, [&]<Kind kind>() {
    if constexpr (kind != Kind::modulate) {
      for (int64_t item = first; item < last; ++item) {
        static_cast<Joined*>(job.of_items)[item] = Forward<kind>::join(found + item * job.stretches, job.stretches);
      }
    }
  });
}

void finish_forward(const RowJob& job, int64_t first, int64_t last, void* memory) {
  const Measured* found = static_cast<const Measured*>(job.of_blocks);
  const Joined* joined = static_cast<const Joined*>(job.of_items);
  with_kind(job.kind, [&]<Kind kind>() {
    run_stretches(job, first, last, memory, [&](const Tile& tile, int64_t block, BlockParams& params) {
      if constexpr (kind == Kind::modulate) {
        modulate_only_of(params.params)(tile, params.params);
      } else {
        const Joined& row = joined[block / job.stretches];
        if (block % job.stretches == 0) Forward<kind>::keep(tile, row.top, row.norm);
        forward_of<kind>(params.params).finish(tile, found[block], row);
      }
      deliver(job, tile);
    });
  });
}

template <bool WithParams, bool Again>
Backward backward_of(const RowJob& job) {
  return with_order(job.order, [&]<int N>() {
    if (job.kind == Kind::multimax) return backward_of<Kind::multimax, N, WithParams, Again>();
    if (job.kind == Kind::log_multimax) return backward_of<Kind::log_multimax, N, WithParams, false>();
    return backward_of<Kind::modulate, N, WithParams, false>();
  });
}

Backward backward_of(const RowJob& job) {
  if constexpr (!has_y) {
    if (job.stretches > 1) return job.sums ? backward_of<true, true>(job) : backward_of<false, true>(job);
  }
  return job.sums ? backward_of<true, false>(job) : backward_of<false, false>(job);
}

void backward(const RowJob& job, int64_t first, int64_t last, void* memory) {
  const Backward passes = backward_of(job);
  run_blocks(job, first, last, memory, [&](const Tile* tiles, int rows, const Scratch&, BlockParams& block) {
    RowStats stats[batch_rows];
    passes.measure(tiles, rows, block.params, stats);
    passes.finish(tiles, rows, block.params, block.slopes, stats, block.sums);
  });
}

void measure_backward(const RowJob& job, int64_t first, int64_t last, void* memory) {
  const Backward passes = backward_of(job);
  run_stretches(job, first, last, memory, [&](const Tile& tile, int64_t block, BlockParams& params) {
    passes.measure(&tile, 1, params.params, static_cast<RowStats*>(job.of_blocks) + block);
  });
}

void join_backward(const RowJob& job, int64_t first, int64_t last) {
  const RowStats* found = static_cast<const RowStats*>(job.of_blocks);
  for (int64_t item = first; item < last; ++item) {
    static_cast<RowStats*>(job.of_items)[item] = Backward::join(found + item * job.stretches, job.stretches);
  }
}

void finish_backward(const RowJob& job, int64_t first, int64_t last, void* memory) {
  const Backward passes = backward_of(job);
  run_stretches(job, first, last, memory, [&](const Tile& tile, int64_t block, BlockParams& params) {
    const RowStats* row = static_cast<const RowStats*>(job.of_items) + block / job.stretches;
    passes.finish(&tile, 1, params.params, params.slopes, row, params.sums);
    deliver(job, tile);
    if (job.sums != nullptr) params.sums.total(job.sums + block * 4 * job.order);
  });
}

// measured: 48 floats and 96 of half precision where blocks are exchanged in registers
constexpr int64_t short_length = Columns<T, S::width>::in_registers ? 192 / sizeof(T) : S::width;

int64_t scratch_bytes(const RowJob& job) { return Scratch(job, nullptr).bytes; }

}  // namespace

const RowKernels MULTIMAX_OF_DTYPE(row_kernels) = {
    S::width,
    short_length,
    stretch_segments * segment,
    max(sizeof(Measured), sizeof(RowStats)),
    max(sizeof(Joined), sizeof(RowStats)),
    scratch_bytes,
    {forward, measure_forward, join_forward, finish_forward},
    {backward, measure_backward, join_backward, finish_backward},
};

}  // namespace multimax::MULTIMAX_ISA
