// The row part of MultiMax cross-entropy: what one call has to do, free of torch.
//
// A row has C logits x; s = sigma(x), p = softmax(s). What the loss wants of class c is
//     q_c = w_c ((1 - smoothing) t_c + smoothing / C),
// t the target's probabilities (1 at an index) and w the classes' weights. With log-sum L = log sum_c exp(s_c)
//     loss = sum_c q_c (L - s_c),   d loss / d s_c = p_c sum_k q_k - q_c.
// The forward gives the sums that this takes, not the loss: those of several parts of a row, one per process, can be
// put together. An index is kept out of q, as a correction of one entry; with an index and no smoothing q is zero.
#pragma once

#include <cstdint>

#include "simd/isa.h"

namespace multimax {

// The forward's results, (planes, rows): the largest s and sum of exp(s - largest); s of the target's index; sum of q
// over all entries that are not masked, and of q (s - largest); sum of exp(s - largest) (s - largest); index of the
// first largest, -1 if there is none. The last four only if asked for. Where all is masked, "largest" is -inf, and 0 in
// sums.
enum LossPlane { top, total, score, mass, dot, spread, best, loss_planes };

struct LossJob {
  int order;
  int64_t rows, classes;

  void* x;             // (rows, classes), a row's entries side by side
  int64_t row_stride;  // in elements
  const void* params;  // (4, order) of the compute type: lower, upper coefs, lower, upper knots

  const int64_t* target;  // (rows) indices, or null
  int64_t first_class;    // the index of the row's first entry
  int64_t ignore_index;   // rows with this target are left out: zeros
  // (rows, classes), or null; of the compute type if `wide`, else of x's type
  const void* probabilities;
  int64_t probabilities_stride;
  bool wide;
  const void* weight;     // (classes) of the compute type, or null
  double uniform, share;  // smoothing / C, 1 - smoothing
  bool full;              // forward: all planes
  double* stats;          // (loss_planes, rows)
  // backward: d loss of each row is multiplied by scale, and p in it by p_scale
  const double *scale, *p_scale;  // (rows)
  void* out;                      // like x, and perhaps x itself
  int64_t out_stride;
  double* sums;  // (blocks, 4 order), or null where the parameters need no gradient

  int64_t block_rows;

  bool dense() const { return probabilities != nullptr || uniform != 0; }
  int64_t blocks() const { return (rows + block_rows - 1) / block_rows; }
};

// The kernels of one instruction set and dtype.
struct LossKernels {
  int64_t (*scratch_bytes)(const LossJob&);  // that one thread needs, aligned to 64
  void (*forward)(const LossJob&, int64_t first_block, int64_t last_block, void* scratch);
  void (*backward)(const LossJob&, int64_t first_block, int64_t last_block, void* scratch);
  void (*add)(void* sum, const void* part, int64_t entries);  // to sums of the compute type
};

MULTIMAX_DECLARE_DTYPES(LossKernels, loss_kernels)

}  // namespace multimax
