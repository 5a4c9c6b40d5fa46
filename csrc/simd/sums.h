// The sums behind the parameters' gradients, on their way from vectors to double.
#pragma once

#include "simd/simd.h"

namespace multimax::MULTIMAX_ISA {

// vectors added to the parameters' sums before these are folded into double
constexpr int64_t fold_every = 128;

template <class S>
struct ParamSums {
  using V = typename S::V;
  V* lanes;         // (4 order), of the compute type
  double* folded;   // (4 order, width)
  int64_t pending;  // vectors added since the last fold
  int order;

  void clear() {
    for (int j = 0; j < 4 * order; ++j) lanes[j] = V{};
    for (int j = 0; j < 4 * order * S::width; ++j) folded[j] = 0;
    pending = 0;
  }
  void fold() {
    for (int j = 0; j < 4 * order; ++j) {
      S::add_to(folded + j * S::width, lanes[j]);
      lanes[j] = V{};
    }
    pending = 0;
  }
  void total(double* out) {
    fold();
    for (int j = 0; j < 4 * order; ++j) {
      out[j] = 0;
      for (int i = 0; i < S::width; ++i) out[j] += folded[j * S::width + i];
    }
  }
};

}  // namespace multimax::MULTIMAX_ISA
