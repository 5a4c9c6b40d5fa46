// The attention kernels. Compiled once for each instruction set, with MULTIMAX_ISA naming it.
//
// Scores exist only as tiles of query_block x key_block. Products run in float32, whatever the tensors' type, but for
// bfloat16 where the machine multiplies that: see operands.h.
#include "attention/attention.h"

#include "attention/backward.h"
#include "attention/few.h"
#include "attention/forward.h"

namespace multimax::MULTIMAX_ISA {
namespace {

template <class Pass, class Scratch>
void run_items(const AttentionJob& job, int64_t first, int64_t last, void* memory) {
  const Scratch scratch(job, memory);
  const Pass pass{job, scratch};
  for (int64_t item = first; item < last; ++item) pass.run(item);
}

void forward(const AttentionJob& job, int64_t first, int64_t last, void* memory) {
  auto run = run_items<Forward, ForwardScratch>;
  if (job.few_queries()) {
    run = with_row_type(job.dtype, []<class T>() { return run_items<Few<T>, ForwardScratch>; });
  }
  run(job, first, last, memory);
}

void merge(const AttentionJob& job, int64_t first, int64_t last, void* memory) {
  const ForwardScratch scratch(job, memory);
  const Forward forward{job, scratch};
  for (int64_t row = first; row < last; ++row) forward.merge(row);
}

void settle(const AttentionJob& job, const float* grad_lse, double* sums, int64_t first, int64_t last, void* memory) {
  const BackwardScratch scratch(job, memory);
  const auto settle_line_of = with_order(job.order, []<int N>() { return settle_line<N>; });
  for (int64_t line = first; line < last; ++line) {
    settle_line_of(job, scratch, grad_lse, sums + line * 4 * job.order, line);
  }
}

int64_t scratch_bytes(const AttentionJob& job, bool backward) {
  return backward ? BackwardScratch(job, nullptr).bytes : ForwardScratch(job, nullptr).bytes;
}

}  // namespace

const AttentionKernels attention_kernels = {
    forward_items, scratch_bytes, forward, merge, delta, run_items<Backward, BackwardScratch>, settle, collect,
};

}  // namespace multimax::MULTIMAX_ISA
