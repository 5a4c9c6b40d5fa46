// The row kernels. Compiled once for each instruction set and dtype, with MULTIMAX_ISA and MULTIMAX_DTYPE naming them.
#include "rows/rows.h"

#include "rows/backward.h"
#include "rows/forward.h"
#include "rows/layout.h"

namespace multimax::MULTIMAX_ISA {
namespace {

// Calls pass(tiles, rows, scratch, params, slopes, param_sums) for the items of each block, a batch of rows at a time.
template <class Pass>
MULTIMAX_INLINE void run_blocks(const RowJob& job, int64_t first, int64_t last, void* memory, Pass pass) {
  const Scratch scratch(job, memory);
  for (int64_t block = first; block < last; ++block) {
    int64_t item = block / job.run_blocks * job.run_items + block % job.run_blocks * job.block_items;
    int64_t end = min(item + job.block_items, (block / job.run_blocks + 1) * job.run_items);
    Position at;
    at.seek(job, item, S::width);
    const C* set = static_cast<const C*>(job.params) + at.offset(job, job.set_strides) * 4 * job.order;
    const C *b = set + 2 * job.order, *d = set + 3 * job.order;
    for (int i = 0; i < 2 * job.order; ++i) scratch.slopes[i] = set[i] * static_cast<C>(i % job.order + 1);
    const Params<C> params{job.order, set, set + job.order, b, d};
    const Params<C> slopes{job.order, scratch.slopes, scratch.slopes + job.order, b, d};
    ParamSums<S> param_sums{scratch.sums, scratch.folded, 0, job.order};
    if (job.sums != nullptr) param_sums.clear();

    while (item < end) {
      Tile tiles[batch_rows];
      int rows = static_cast<int>(min(scratch.batch, end - item));
      item += rows;
      for (int r = 0; r < rows; ++r, at.next(job, S::width)) lay_out(job, at, scratch, r, tiles[r]);
      pass(tiles, rows, scratch, params, slopes, param_sums);
      for (int r = 0; r < rows; ++r) deliver(job, tiles[r]);
    }
    if (job.sums != nullptr) param_sums.total(job.sums + block * 4 * job.order);
  }
}

void forward(const RowJob& job, int64_t first, int64_t last, void* memory) {
  const auto modulate_pass = with_order(job.order, []<int N>() { return modulate<N>; });
  const auto modulate_only_pass = with_order(job.order, []<int N>() { return modulate_only<N>; });
  run_blocks(job, first, last, memory,
             [&](const Tile* tiles, int rows, const Scratch& scratch, const Params<C>& params, const Params<C>&,
                 ParamSums<S>&) {
               switch (job.kind) {
                 case Kind::multimax:
                   return Forward<Kind::multimax>{params, modulate_pass}.run(tiles, rows, scratch.segment_tops);
                 case Kind::log_multimax:
                   return Forward<Kind::log_multimax>{params, modulate_pass}.run(tiles, rows, scratch.segment_tops);
                 case Kind::modulate:
                   for (int r = 0; r < rows; ++r) modulate_only_pass(tiles[r], params);
               }
             });
}

template <bool WithParams>
Backward backward_of(const RowJob& job) {
  return with_order(job.order, [&]<int N>() {
    if (job.kind == Kind::multimax) return backward_of<Kind::multimax, N, WithParams>();
    if (job.kind == Kind::log_multimax) return backward_of<Kind::log_multimax, N, WithParams>();
    return backward_of<Kind::modulate, N, WithParams>();
  });
}

void backward(const RowJob& job, int64_t first, int64_t last, void* memory) {
  const Backward passes = job.sums != nullptr ? backward_of<true>(job) : backward_of<false>(job);
  run_blocks(job, first, last, memory,
             [&](const Tile* tiles, int rows, const Scratch&, const Params<C>& params, const Params<C>& slopes,
                 ParamSums<S>& param_sums) { passes.run(tiles, rows, params, slopes, param_sums); });
}

// measured: 48 floats and 96 of half precision where blocks are exchanged in registers
constexpr int64_t short_length = Columns<T, S::width>::in_registers ? 192 / sizeof(T) : S::width;

int64_t scratch_bytes(const RowJob& job) { return Scratch(job, nullptr).bytes; }

}  // namespace

const RowKernels MULTIMAX_OF_DTYPE(row_kernels) = {S::width, short_length, scratch_bytes, forward, backward};

}  // namespace multimax::MULTIMAX_ISA
