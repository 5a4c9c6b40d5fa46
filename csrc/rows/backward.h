// The backward of an item, and its share of the parameters' gradients.
#pragma once

#include "rows/item.h"

namespace multimax::MULTIMAX_ISA {
namespace {

constexpr bool has_y = same<T, C>;

struct RowStats {
  V top{}, norm{}, dot{};
  bool may_be_masked;  // some of its whole vectors
};

// What the forward kept of an item's rows.
inline void recall(const Tile& t, RowStats& stats) {
  if (!t.columns) {
    stats.top = S::set(t.stats[0]);
    stats.norm = S::set(t.stats[t.stats_plane]);
    return;
  }
  C tops[S::width] = {}, norms[S::width] = {};
  for (int i = 0; i < t.lanes(); ++i) {
    tops[i] = t.stats[i * t.stats_stride];
    norms[i] = t.stats[i * t.stats_stride + t.stats_plane];
  }
  stats.top = S::load(tops);
  stats.norm = S::load(norms);
}

// multimax: the sum of grad p, p being the forward's weights; where they have to be found again, their numerators are
// left in work, unless the next pass finds them Again. log_multimax: the sum of grad. What
// is masked has no part in it, whatever its grad; a weight of 0 takes care of that except, unless Careful, where grad
// is not finite. Tells also whether a row may have masked entries.
template <int N, Kind kind, bool Careful, bool Again>
MULTIMAX_INLINE void dot_of_row(const Tile& t, const Vectors<S, N>& of_params, RowStats& stats) {
  const auto x_ = t.x, y_ = t.y, grad = t.grad;
  const auto work = t.work;
  const Vectors<S, N> f = of_params;
  const V floor = S::set(masked_floor<T>), top = stats.top;
  constexpr int chains = has_y ? 4 : 1;
  V lanes{};
  double total = 0;
  auto masked_lanes = S::first(0);
  for (int64_t begin = 0; begin < t.vectors(); begin += sum_every) {
    V sums[chains] = {};
    if constexpr (kind == Kind::multimax && !has_y && !Again) {  // apart: the shorter the chain, the more overlap
      each(
          t, begin, min(begin + sum_every, t.vectors()), MULTIMAX_EACH {
            V x = x_.load(i, part);
            work.store(i, S::select(masked(x, floor, part), lowest(), sigma(f, x) - top), part);
          });
    }
    each<chains>(
        t, begin, min(begin + sum_every, t.vectors()), MULTIMAX_EACH {
          V g = grad.load(i, part);
          auto off = S::first(0);
          if constexpr (kind == Kind::multimax && has_y) {
            V y = y_.load(i, part);
            g = g * y;
            off = S::le(y, V{});
            if constexpr (Careful) g = S::zero_if(masked(x_.load(i, part), floor, part), g);
          } else {
            V x = x_.load(i, part);
            off = masked(x, floor, part);
            if constexpr (Careful || kind == Kind::log_multimax) g = S::zero_if(off, g);
            if constexpr (kind == Kind::multimax && Again) {
              g = g * exp<S>(S::select(off, lowest(), sigma(f, x) - top));
            } else if constexpr (kind == Kind::multimax) {
              V e = exp<S>(work.load(i, part));
              if constexpr (same<decltype(part), Part>) e = S::zero_if(off, e);
              work.store(i, e, part);
              g = g * e;
            }
          }
          if constexpr (same<decltype(part), Whole>) masked_lanes = S::either(masked_lanes, off);
          sums[chain] = sums[chain] + g;
        });
    for (int chain = 0; chain < chains; ++chain) lanes = lanes + sums[chain];
    if (!t.columns && (begin + sum_every) % segment == 0) {
      total += static_cast<double>(S::sum(lanes));
      lanes = V{};
    }
  }
  stats.may_be_masked = S::any(masked_lanes);
  stats.dot = t.columns ? lanes : S::set(static_cast<C>(total + static_cast<double>(S::sum(lanes))));
  if constexpr (kind == Kind::multimax && !has_y) stats.dot = stats.dot * stats.norm;
}

template <int N, Kind kind, bool Careful, bool Again>
void dot(const Tile* tiles, int rows, const Params<C>& params, RowStats* stats) {
  const Vectors<S, N> f(params);
  for (int r = 0; r < rows; ++r) {
    if (!has_y && !Careful) recall(tiles[r], stats[r]);
    dot_of_row<N, kind, Careful, Again>(tiles[r], f, stats[r]);
  }
}

// All rows of a batch in one go: parameters and sums stay in registers. slopes: as sigma_backward wants them.
template <int N, Kind kind, bool WithParams, bool Masked, bool Again>
void gradients(const Tile* tiles, const RowStats* stats, int rows, const Params<C>& params,
               const Params<C>& slope_params, ParamSums<S>& param_sums) {
  const Vectors<S, N> f(params), slopes(slope_params);
  const V floor = S::set(masked_floor<T>);
  V in_registers[N == 0 ? 1 : 4 * N];
  V* sums = N == 0 ? param_sums.lanes : in_registers;
  if constexpr (WithParams) {
    for (int j = 0; j < 4 * N; ++j) sums[j] = param_sums.lanes[j];
  }
  for (int r = 0; r < rows; ++r) {
    const Tile& t = tiles[r];
    const auto x_ = t.x, y_ = t.y, grad = t.grad, out = t.out;
    const auto work = t.work;
    const V top = stats[r].top, norm = stats[r].norm, dot = stats[r].dot, dot_norm = dot * norm;
    const int64_t ahead = t.vectors() < 32 ? 0 : page;  // past several short rows it is too far
    for (int64_t begin = 0; begin < t.vectors(); begin += fold_every) {
      int64_t end = min(begin + fold_every, t.vectors());
      each(
          t, begin, end, MULTIMAX_EACH {
            constexpr bool test = Masked || same<decltype(part), Part>;
            V x = x_.load(i, part);
            fetch_ahead(x_.data + i * x_.step, ahead);
            fetch_ahead<true>(out.data + i * out.step, ahead);
            [[maybe_unused]] auto off = masked(x, floor, part);
            if constexpr (test) x = S::zero_if(off, x);  // 0 * inf would be NaN
            V ds = grad.load(i, part);
            if constexpr (kind == Kind::multimax && has_y) {
              ds = y_.load(i, part) * (ds - dot);
            } else if constexpr (kind == Kind::multimax && Again) {
              ds = exp<S>(sigma(f, x) - top) * (ds * norm - dot_norm);
            } else if constexpr (kind == Kind::multimax) {
              ds = work.load(i, part) * (ds * norm - dot_norm);
            } else if constexpr (kind == Kind::log_multimax) {
              V log_p;
              if constexpr (has_y) {
                log_p = y_.load(i, part);
              } else {
                log_p = (sigma(f, x) - top) - norm;
              }
              ds = S::zero_if(S::le(log_p, lowest()), ds - exp<S>(log_p) * dot);  // sigma may have overflowed to -inf
            }
            if constexpr (test) ds = S::zero_if(off, ds);
            out.store(i, sigma_backward<WithParams>(slopes, x, ds, sums), part);
          });
      if (WithParams && (param_sums.pending += end - begin) >= fold_every) {
        for (int j = 0; j < 4 * N; ++j) param_sums.lanes[j] = sums[j];
        param_sums.fold();
        for (int j = 0; j < 4 * N; ++j) sums[j] = V{};
      }
    }
  }
  if constexpr (WithParams) {
    for (int j = 0; j < 4 * N; ++j) param_sums.lanes[j] = sums[j];
  }
}

// The passes for one kind and order, with or without the parameters' sums.
struct Backward {
  decltype(&dot<0, Kind::multimax, false, false>) dot, careful_dot;  // null for modulate
  decltype(&gradients<0, Kind::multimax, false, false, false>) gradients, masked_gradients;

  void measure(const Tile* tiles, int rows, const Params<C>& params, RowStats* stats) const {
    for (int r = 0; r < rows; ++r) stats[r].may_be_masked = dot == nullptr;
    if (dot == nullptr) return;
    dot(tiles, rows, params, stats);
    for (int r = 0; r < rows; ++r) {
      if (S::any(S::nan(stats[r].dot - stats[r].dot))) careful_dot(tiles + r, 1, params, stats + r);
    }
  }

  // Of the stretches of a long row
  static RowStats join(const RowStats* found, int64_t stretches) {
    RowStats row = found[0];
    double dots[S::width] = {};
    for (int64_t i = 0; i < stretches; ++i) {
      S::add_to(dots, found[i].dot);
      row.may_be_masked |= found[i].may_be_masked;
    }
    C lanes[S::width];
    for (int i = 0; i < S::width; ++i) lanes[i] = static_cast<C>(dots[i]);
    row.dot = S::load(lanes);
    return row;
  }

  void finish(const Tile* tiles, int rows, const Params<C>& params, const Params<C>& slopes, const RowStats* stats,
              ParamSums<S>& param_sums) const {
    bool may_be_masked = false;
    for (int r = 0; r < rows; ++r) may_be_masked |= stats[r].may_be_masked;
    (may_be_masked ? masked_gradients : gradients)(tiles, stats, rows, params, slopes, param_sums);
  }
};

template <Kind kind, int N, bool WithParams, bool Again>
Backward backward_of() {
  constexpr auto masked_gradients = gradients<N, kind, WithParams, true, Again>;
  if constexpr (kind == Kind::modulate) {
    return {nullptr, nullptr, masked_gradients, masked_gradients};
  } else {
    constexpr int dot_order = kind == Kind::multimax && !has_y ? N : 0;  // else sigma has no part in it
    return {dot<dot_order, kind, false, Again>, dot<dot_order, kind, true, Again>,
            Again ? masked_gradients : gradients<N, kind, WithParams, false, Again>, masked_gradients};
  }
}

}  // namespace
}  // namespace multimax::MULTIMAX_ISA
