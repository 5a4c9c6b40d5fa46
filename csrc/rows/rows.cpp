// The row kernels. Compiled once for each instruction set, with MULTIMAX_ISA naming it; uses nothing of the C++
// library, since an inline function of it, compiled here for a newer machine, could end up in everybody's code.
#include "rows/rows.h"

#include "rows/backward.h"
#include "rows/forward.h"
#include "rows/layout.h"

namespace multimax::MULTIMAX_ISA {
namespace {

template <bool backward, class T, class S, int N, Kind kind>
void run_blocks(const RowJob& job, int64_t first, int64_t last, void* memory) {
  using C = typename S::T;
  const Scratch<S, T> scratch(job, memory);
  const auto floor = S::set(static_cast<C>(job.floor));

  for (int64_t block = first; block < last; ++block) {
    int64_t item = block / job.run_blocks * job.run_items + block % job.run_blocks * job.block_items;
    int64_t end = min(item + job.block_items, (block / job.run_blocks + 1) * job.run_items);
    Position at;
    at.seek(job, item, S::width);
    const C* set = static_cast<const C*>(job.params) + at.offset(job, job.set_strides) * 4 * job.order;
    const C *b = set + 2 * job.order, *d = set + 3 * job.order;
    const Vectors<S, N> f({job.order, set, set + job.order, b, d});
    for (int i = 0; i < 2 * job.order; ++i) scratch.slopes[i] = set[i] * static_cast<C>(i % job.order + 1);
    const Vectors<S, N> slopes({job.order, scratch.slopes, scratch.slopes + job.order, b, d});
    ParamSums<S> params{scratch.sums, scratch.folded, 0, job.order};
    if (backward) params.clear();

    while (item < end) {
      Tile<S, T> tiles[batch_rows];
      int rows = static_cast<int>(min(scratch.batch, end - item));
      item += rows;
      for (int r = 0; r < rows; ++r, at.next(job, S::width)) lay_out(job, at, scratch, r, tiles[r]);
      if constexpr (!backward) {
        Forward<S, T, N, kind>{f, floor}.run(tiles, rows, scratch.segment_tops);
      } else if (job.sums != nullptr) {
        Backward<S, T, N, kind, true>{f, slopes, floor, params}.run(tiles, rows);
      } else {
        Backward<S, T, N, kind, false>{f, slopes, floor, params}.run(tiles, rows);
      }
      for (int r = 0; r < rows; ++r) deliver(job, tiles[r]);
    }
    if (backward && job.sums != nullptr) params.total(job.sums + block * 4 * job.order);
  }
}

template <bool backward, class T>
void run(const RowJob& job, int64_t first, int64_t last, void* memory) {
  using S = Simd<typename Compute<T>::type>;
  auto with_order = [&]<Kind kind>() {
    if (job.order == 1) return run_blocks<backward, T, S, 1, kind>(job, first, last, memory);
    if (job.order == 2) return run_blocks<backward, T, S, 2, kind>(job, first, last, memory);
    run_blocks<backward, T, S, 0, kind>(job, first, last, memory);
  };
  if (job.kind == Kind::multimax) return with_order.template operator()<Kind::multimax>();
  if (job.kind == Kind::log_multimax) return with_order.template operator()<Kind::log_multimax>();
  with_order.template operator()<Kind::modulate>();
}

template <bool backward>
void run(const RowJob& job, int64_t first, int64_t last, void* memory) {
  switch (job.dtype) {
    case DType::f32:
      return run<backward, float>(job, first, last, memory);
    case DType::f64:
      return run<backward, double>(job, first, last, memory);
    case DType::bf16:
      return run<backward, bf16>(job, first, last, memory);
    case DType::f16:
      return run<backward, f16>(job, first, last, memory);
  }
}

int64_t scratch_bytes(const RowJob& job) {
  if (job.dtype == DType::f64) return Scratch<Simd<double>, double>(job, nullptr).bytes;
  if (job.dtype == DType::f32) return Scratch<Simd<float>, float>(job, nullptr).bytes;
  return Scratch<Simd<float>, bf16>(job, nullptr).bytes;
}

}  // namespace

const RowKernels row_kernels = {Simd<float>::width, Simd<double>::width, scratch_bytes, run<false>, run<true>};

}  // namespace multimax::MULTIMAX_ISA
