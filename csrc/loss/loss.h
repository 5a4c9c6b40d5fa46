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
  double* sums;  // (items, 4 order), or null where the parameters need no gradient

  bool dense() const { return probabilities != nullptr || uniform != 0; }
  bool ignored(int64_t row) const { return target != nullptr && target[row] == ignore_index; }

  // Work is divided into items: some short rows, or a part of a long one. Large enough that finishing an item's sums
  // costs nothing, small enough to share evenly among many threads.
  static constexpr int64_t part_entries = 8192;  // a multiple of the segments of all kernels
  int64_t parts() const { return classes <= part_entries ? 1 : (classes + part_entries - 1) / part_entries; }
  int64_t item_rows() const {
    return parts() > 1 ? 1 : classes > 0 && 2 * part_entries / classes > 0 ? 2 * part_entries / classes : 1;
  }
  int64_t items() const { return (rows + item_rows() - 1) / item_rows() * parts(); }
  struct LossSums* of_parts;  // (rows, parts), where there are several

  // The results of a row from those of its parts.
  inline void join(int64_t row) const;
};

// Sums over a part of a row: the forward's results but for the index's class, 0 where it lies elsewhere.
struct LossSums {
  double top = -__builtin_inf(), total = 0, score = 0, mass = 0, dot = 0, spread = 0, best = -1;

  static LossSums of_ignored() { return {.top = 0, .best = 0}; }

  // The part that follows, to the higher of the two maxima.
  void add(const LossSums& next) {
    score += next.score;
    const double higher = next.top > top ? next.top : top;
    if (higher == -__builtin_inf()) {
      total += next.total;  // 0, or NaN
      mass += next.mass;
      dot += next.dot;
      return;
    }
    // a factor of 0 is 0, whatever it is multiplied with
    auto times = [](double x, double y) { return x == 0 ? 0.0 : x * y; };
    const double down = top - higher, next_down = next.top - higher;
    const double a = __builtin_exp(down), b = __builtin_exp(next_down);
    spread = times(a, spread + times(total, down)) + times(b, next.spread + times(next.total, next_down));
    dot = dot + times(mass, down) + next.dot + times(next.mass, next_down);
    mass += next.mass;
    total = total * a + next.total * b;
    if (next.top > top) best = next.best;
    top = higher;
  }
  void write(double* stats, int64_t rows) const {
    const double planes[loss_planes] = {top, total, score, mass, dot, spread, best};
    for (int plane = 0; plane < loss_planes; ++plane) stats[plane * rows] = planes[plane];
  }
};

void LossJob::join(int64_t row) const {
  LossSums whole;
  for (int64_t part = 0; part < parts(); ++part) whole.add(of_parts[row * parts() + part]);
  if (!full) whole.best = 0;
  whole.write(stats + row, rows);
}

// The kernels of one instruction set and dtype.
struct LossKernels {
  int64_t (*scratch_bytes)(const LossJob&);  // that one thread needs, aligned to 64
  void (*forward)(const LossJob&, int64_t first_item, int64_t last_item, void* scratch);
  void (*backward)(const LossJob&, int64_t first_item, int64_t last_item, void* scratch);
  void (*add)(void* sum, const void* part, int64_t entries);  // to sums of the compute type
};

MULTIMAX_DECLARE_DTYPES(LossKernels, loss_kernels)

}  // namespace multimax
