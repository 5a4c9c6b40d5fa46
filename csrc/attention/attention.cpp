// The attention kernels. Compiled once for each instruction set, as rows.cpp is, and by the same rule.
//
// Scores exist only as tiles of query_block x key_block. All products run in float32, whatever the tensors' type.
#include "attention/attention.h"

#include "attention/backward.h"
#include "attention/forward.h"

namespace multimax::MULTIMAX_ISA {
namespace {

template <template <class, int> class Pass, class Scratch, class T>
void run_items(const AttentionJob& job, int64_t first, int64_t last, void* memory) {
  const Scratch scratch(job, memory);
  for (int64_t item = first; item < last; ++item) {
    if (job.order == 1) {
      Pass<T, 1>{job, scratch}.run(item);
    } else if (job.order == 2) {
      Pass<T, 2>{job, scratch}.run(item);
    } else {
      Pass<T, 0>{job, scratch}.run(item);
    }
  }
}

template <template <class, int> class Pass, class Scratch>
void run_items(const AttentionJob& job, int64_t first, int64_t last, void* memory) {
  if (job.dtype == DType::f32) return run_items<Pass, Scratch, float>(job, first, last, memory);
  if (job.dtype == DType::bf16) return run_items<Pass, Scratch, bf16>(job, first, last, memory);
  run_items<Pass, Scratch, f16>(job, first, last, memory);
}

void delta(const AttentionJob& job, const float* grad_lse, float* to, int64_t first, int64_t last) {
  if (job.dtype == DType::f32) return delta<float>(job, grad_lse, to, first, last);
  if (job.dtype == DType::bf16) return delta<bf16>(job, grad_lse, to, first, last);
  delta<f16>(job, grad_lse, to, first, last);
}

void collect(const AttentionJob& job, const Heads& to, int64_t first, int64_t last) {
  if (job.dtype == DType::f32) return collect<float>(job, to, first, last);
  if (job.dtype == DType::bf16) return collect<bf16>(job, to, first, last);
  collect<f16>(job, to, first, last);
}

void settle(const AttentionJob& job, const float* grad_lse, double* sums, int64_t first, int64_t last, void* memory) {
  const BackwardScratch scratch(job, memory);
  for (int64_t line = first; line < last; ++line) {
    double* to = sums + line * 4 * job.order;
    if (job.order == 1) {
      settle_line<1>(job, scratch, grad_lse, to, line);
    } else if (job.order == 2) {
      settle_line<2>(job, scratch, grad_lse, to, line);
    } else {
      settle_line<0>(job, scratch, grad_lse, to, line);
    }
  }
}

int64_t scratch_bytes(const AttentionJob& job, bool backward) {
  return backward ? BackwardScratch(job, nullptr).bytes : ForwardScratch(job, nullptr).bytes;
}

}  // namespace

const AttentionKernels attention_kernels = {
    forward_items, scratch_bytes, run_items<Forward, ForwardScratch>, delta, run_items<Backward, BackwardScratch>,
    settle,        collect,
};

}  // namespace multimax::MULTIMAX_ISA
