// The forward of an item: sigma and its maximum, exp and its sum, the weights.
#pragma once

#include "rows/item.h"

namespace multimax::MULTIMAX_ISA {
namespace {

// A pass is compiled for what it depends on and no more: the order N here, the kind below.

// For each row of a batch: work = sigma(x), -inf where masked; each lane's maximum
template <int N>
void modulate(const Tile* tiles, int rows, const Params<C>& params, V* tops) {
  const Vectors<S, N> f(params);
  const V floor = S::set(masked_floor<T>);
  for (int r = 0; r < rows; ++r) {
    const Tile& t = tiles[r];
    const auto x_ = t.x;
    const auto work = t.work;
    V m = lowest();
    each(
        t, 0, t.vectors(), MULTIMAX_EACH {
          V x = x_.load(i, part);
          fetch_ahead(x_.data + i * x_.step);
          V s = S::select(masked(x, floor, part), lowest(), sigma(f, x));
          m = S::max(s, m);
          work.store(i, s, part);
        });
    tops[r] = m;
  }
}

// sigma alone; masked entries pass through unchanged
template <int N>
void modulate_only(const Tile& t, const Params<C>& params) {
  const auto x_ = t.x, out = t.out;
  const Vectors<S, N> f(params);
  const V floor = S::set(masked_floor<T>);
  each(
      t, 0, t.vectors(), MULTIMAX_EACH {
        V x = x_.load(i, part);
        out.store(i, S::select(S::le(x, floor), x, sigma(f, x)), part);
      });
}

// The weights from x, once a row's largest sigma and its norm are known
template <Kind kind, int N>
void weigh(const Tile& t, const Params<C>& params, V top, V norm) {
  const auto x_ = t.x, out = t.out;
  const Vectors<S, N> f(params);
  const V floor = S::set(masked_floor<T>);
  const V off_value = kind == Kind::multimax ? V{} : lowest();
  each(
      t, 0, t.vectors(), MULTIMAX_EACH {
        V x = x_.load(i, part);
        fetch_ahead(x_.data + i * x_.step);
        fetch_ahead<true>(out.data + i * out.step);
        V s = sigma(f, x) - top;
        V y = kind == Kind::multimax ? exp<S>(s) * norm : s - norm;
        out.store(i, S::select(masked(x, floor, part), off_value, y), part);
      });
}

// Of a stretch of a long row, segment by segment: the largest sigma, and the sum of exp(sigma - that).
struct Measured {
  V tops[stretch_segments], totals[stretch_segments];
};

// Of a whole row: the largest sigma and the norm.
struct Joined {
  V top, norm;
};

// multimax and log_multimax
template <Kind kind>
struct Forward {
  const Params<C>& params;
  decltype(&modulate<0>) modulate;  // of the order at hand
  decltype(&weigh<kind, 0>) weigh;

  static V finite(V top) { return S::select(S::le(top, lowest()), V{}, top); }

  // each lane's sum of exp(work - base), and, for multimax and if that is kept, work = that exp
  template <bool Keep = true>
  static void exponentiate(const Tile& t, V base, V& total) {
    const auto work = t.work;
    total = V{};
    for (int64_t begin = 0; begin < t.vectors(); begin += sum_every) {
      V sum{};
      each(
          t, begin, min(begin + sum_every, t.vectors()), MULTIMAX_EACH {
            V s = work.load(i, part) - base;
            if constexpr (same<decltype(part), Part>) s = S::select(S::first(part.n), s, lowest());
            V e = exp<S>(s);
            sum = sum + e;
            if constexpr (kind == Kind::multimax && Keep) work.store(i, e, part);
          });
      total = total + sum;
    }
  }

  // multimax: out = work * norm; log_multimax: out = (work - top) - norm
  static void normalise(const Tile& t, V top, V norm) {
    const auto work = t.work;
    const auto out = t.out;
    each(
        t, 0, t.vectors(), MULTIMAX_EACH {
          V s = work.load(i, part);
          fetch_ahead<true>(out.data + i * out.step);
          out.store(i, kind == Kind::multimax ? s * norm : (s - top) - norm, part);
        });
    if (S::any(S::nan(norm))) {  // a NaN in the row: entries that are masked stay so all the same
      each(
          t, 0, t.vectors(), MULTIMAX_EACH {
            Mask off = masked(t.x.load(i, part), S::set(masked_floor<T>), part);
            V off_value = kind == Kind::multimax ? V{} : lowest();
            t.out.store(i, S::select(off, off_value, t.out.load(i, part)), part);
          });
    }
  }

  // 1 / total or log total; 0 for a row of which nothing is left, be it masked or sigma -inf
  static V norm_of(V total) {
    V norm;
    if constexpr (kind == Kind::multimax) {
      norm = static_cast<C>(1) / total;
    } else {
      norm = log_lanes(total);
    }
    return S::select(S::le(total, V{}), V{}, norm);
  }

  static void keep(const Tile& t, V top, V norm) {
    if constexpr (!same<T, C>) {
      C tops[S::width], norms[S::width];
      S::store(tops, top);
      S::store(norms, norm);
      for (int i = 0; i < t.lanes(); ++i) {
        t.stats[i * t.stats_stride] = tops[i];
        t.stats[i * t.stats_stride + t.stats_plane] = norms[i];
      }
    }
  }

  void short_rows(const Tile* tiles, int rows) const {
    const bool columns = tiles[0].columns;
    V top[batch_rows], total[batch_rows];
    modulate(tiles, rows, params, top);
    for (int r = 0; r < rows; ++r) {
      if (!columns) top[r] = S::set(S::max(top[r]));
      top[r] = finite(top[r]);
    }
    for (int r = 0; r < rows; ++r) exponentiate(tiles[r], top[r], total[r]);
    for (int r = 0; r < rows; ++r) {
      if (!columns) total[r] = S::set(S::sum(total[r]));
      total[r] = norm_of(total[r]);
      keep(tiles[r], top[r], total[r]);
    }
    for (int r = 0; r < rows; ++r) normalise(tiles[r], top[r], total[r]);
  }

  // The three steps of a long row. A stretch is at most stretch_segments segments.

  void measure(const Tile& stretch, Measured& found) const {
    for (int64_t k = 0; k < stretch_segments; ++k) {
      const int64_t begin = k * segment, end = min(begin + segment, stretch.vectors());
      found.tops[k] = lowest();
      found.totals[k] = V{};
      if (begin >= end) continue;
      const Tile t = slice(stretch, begin, end);
      V top, total;
      modulate(&t, 1, params, &top);
      if (!t.columns) top = S::set(S::max(top));
      t.keeps_work ? exponentiate(t, finite(top), total) : exponentiate<false>(t, finite(top), total);
      if (!t.columns) total = S::set(S::sum(total));
      found.tops[k] = top;
      found.totals[k] = total;
    }
  }

  static Joined join(const Measured* found, int64_t stretches) {
    V top = lowest(), total{};
    for (int64_t i = 0; i < stretches; ++i) {
      for (int64_t k = 0; k < stretch_segments; ++k) {
        V m = found[i].tops[k], higher = S::max(m, top);
        total = total * exp<S>(top - finite(higher)) + found[i].totals[k] * exp<S>(m - finite(higher));
        top = higher;
      }
    }
    return {finite(top), norm_of(total)};
  }

  void finish(const Tile& stretch, const Measured& found, const Joined& row) const {
    if (!stretch.keeps_work) return weigh(stretch, params, row.top, row.norm);
    for (int64_t k = 0, begin = 0; begin < stretch.vectors(); ++k, begin += segment) {
      // multimax: the exp was taken relative to the segment's own maximum
      V factor = kind == Kind::multimax ? row.norm * exp<S>(found.tops[k] - row.top) : row.norm;
      normalise(slice(stretch, begin, min(begin + segment, stretch.vectors())), row.top, factor);
    }
  }

  void long_row(const Tile& t, Measured* measured) const {
    constexpr int64_t step = stretch_segments * segment;
    const int64_t stretches = (t.vectors() + step - 1) / step;
    auto stretch = [&](int64_t i) { return slice(t, i * step, min((i + 1) * step, t.vectors())); };
    for (int64_t i = 0; i < stretches; ++i) measure(stretch(i), measured[i]);
    const Joined row = join(measured, stretches);
    keep(t, row.top, row.norm);
    for (int64_t i = 0; i < stretches; ++i) finish(stretch(i), measured[i], row);
  }

  void run(const Tile* tiles, int rows, Measured* measured) const {
    if (tiles[0].vectors() <= segment) {
      short_rows(tiles, rows);
    } else {
      long_row(tiles[0], measured);
    }
  }
};

template <Kind kind>
Forward<kind> forward_of(const Params<C>& params) {
  return with_order(params.order, [&]<int N>() { return Forward<kind>{params, modulate<N>, weigh<kind, N>}; });
}

}  // namespace
}  // namespace multimax::MULTIMAX_ISA
