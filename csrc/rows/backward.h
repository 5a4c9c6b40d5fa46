// The backward of an item, and its share of the parameters' gradients.
#pragma once

#include "rows/item.h"

namespace multimax::MULTIMAX_ISA {
namespace {  // part of rows.cpp

template <class S, class T, int N, Kind kind, bool WithParams>
struct Backward {
  using C = typename S::T;
  using V = typename S::V;
  using Item = Tile<S, T>;

  static constexpr bool has_y = same<T, C>;

  const Vectors<S, N>& f;
  const Vectors<S, N>& slopes;
  V floor;
  ParamSums<S>& params;

  struct RowStats {
    V top{}, norm{}, dot{};
    bool may_be_masked;  // some of its whole vectors
  };

  static void recall(const Item& t, RowStats& stats) {
    if constexpr (!has_y && kind != Kind::modulate) {
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
  }

  // multimax: the sum of grad p, p being the forward's weights; where they have to be found again, their numerators are
  // left in work. log_multimax: the sum of grad. What is masked has no part in it, whatever its grad; a weight of 0
  // takes care of that except, unless Careful, where grad is not finite. Tells also whether a row may have masked
  // entries.
  template <bool Careful>
  void dot(const Item& t, RowStats& stats) const {
    const auto x_ = t.x, y_ = t.y, grad = t.grad;
    const auto work = t.work;
    const Vectors<S, N> f = this->f;
    const V floor = this->floor, top = stats.top;
    constexpr int chains = has_y ? 4 : 1;
    V lanes{};
    double total = 0;
    auto masked_lanes = S::first(0);
    for (int64_t begin = 0; begin < t.vectors(); begin += sum_every) {
      V sums[chains] = {};
      each<chains>(
          t, begin, min(begin + sum_every, t.vectors()), MULTIMAX_EACH {
            V g = grad.load(i, part);
            auto off = S::first(0);
            if constexpr (kind == Kind::multimax && has_y) {
              V y = y_.load(i, part);
              g = g * y;
              off = S::le(y, V{});
              if constexpr (Careful) g = S::zero_if(masked<S>(x_.load(i, part), floor, part), g);
            } else {
              V x = x_.load(i, part);
              off = masked<S>(x, floor, part);
              if constexpr (Careful || kind == Kind::log_multimax) g = S::zero_if(off, g);
              if constexpr (kind == Kind::multimax) {
                V e = exp<S>(S::select(off, S::set(minus_infinity<C>()), sigma(f, x) - top));
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

  // All rows of a batch in one go: parameters and sums stay in registers.
  template <bool Masked>
  void gradients(const Item* tiles, const RowStats* stats, int rows) const {
    const Vectors<S, N> f = this->f, slopes = this->slopes;
    const V floor = this->floor;
    V in_registers[N == 0 ? 1 : 4 * N];
    V* sums = N == 0 ? params.lanes : in_registers;
    if constexpr (WithParams) {
      for (int j = 0; j < 4 * N; ++j) sums[j] = params.lanes[j];
    }
    for (int r = 0; r < rows; ++r) {
      const Item& t = tiles[r];
      const auto x_ = t.x, y_ = t.y, grad = t.grad, out = t.out;
      const auto work = t.work;
      const V top = stats[r].top, norm = stats[r].norm, dot = stats[r].dot, dot_norm = dot * norm;
      for (int64_t begin = 0; begin < t.vectors(); begin += fold_every) {
        int64_t end = min(begin + fold_every, t.vectors());
        each(
            t, begin, end, MULTIMAX_EACH {
              constexpr bool test = Masked || same<decltype(part), Part>;
              V x = x_.load(i, part);
              [[maybe_unused]] auto off = masked<S>(x, floor, part);
              if constexpr (test) x = S::zero_if(off, x);  // 0 * inf would be NaN
              V ds = grad.load(i, part);
              if constexpr (kind == Kind::multimax && has_y) {
                ds = y_.load(i, part) * (ds - dot);
              } else if constexpr (kind == Kind::multimax) {
                ds = work.load(i, part) * (ds * norm - dot_norm);
              } else if constexpr (kind == Kind::log_multimax) {
                V log_p;
                if constexpr (has_y) {
                  log_p = y_.load(i, part);
                } else {
                  log_p = (sigma(f, x) - top) - norm;
                }
                ds = ds - exp<S>(log_p) * dot;
              }
              if constexpr (test) ds = S::zero_if(off, ds);
              out.store(i, sigma_backward<WithParams>(slopes, x, ds, sums), part);
            });
        if (WithParams && (params.pending += end - begin) >= fold_every) {
          for (int j = 0; j < 4 * N; ++j) params.lanes[j] = sums[j];
          params.fold();
          for (int j = 0; j < 4 * N; ++j) sums[j] = V{};
        }
      }
    }
    if constexpr (WithParams) {
      for (int j = 0; j < 4 * N; ++j) params.lanes[j] = sums[j];
    }
  }

  void run(const Item* tiles, int rows) const {
    RowStats stats[batch_rows];
    bool may_be_masked = kind == Kind::modulate;
    if constexpr (kind != Kind::modulate) {
      for (int r = 0; r < rows; ++r) recall(tiles[r], stats[r]);
      for (int r = 0; r < rows; ++r) {
        dot<false>(tiles[r], stats[r]);
        if (S::any(S::nan(stats[r].dot - stats[r].dot))) dot<true>(tiles[r], stats[r]);
        may_be_masked |= stats[r].may_be_masked;
      }
    }
    if (may_be_masked) {
      gradients<true>(tiles, stats, rows);
    } else {
      gradients<false>(tiles, stats, rows);
    }
  }
};

}  // namespace
}  // namespace multimax::MULTIMAX_ISA
