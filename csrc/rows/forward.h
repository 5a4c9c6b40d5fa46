// The forward of an item: sigma and its maximum, exp and its sum, the weights.
#pragma once

#include "rows/item.h"

namespace multimax::MULTIMAX_ISA {
namespace {

// A pass is compiled for what it depends on and no more: the order N here, the kind below.

// For each row of a batch: work = sigma(x), -inf where masked; each lane's maximum; which lanes hold nothing but entries
// that are masked, or whose sigma is -inf, which counts as masked too
template <int N>
void modulate(const Tile* tiles, int rows, int64_t begin, int64_t end, const Params<C>& params, V* tops, Mask* empty) {
  const Vectors<S, N> f(params);
  const V floor = S::set(masked_floor<T>);
  for (int r = 0; r < rows; ++r) {
    const Tile& t = tiles[r];
    const auto x_ = t.x;
    const auto work = t.work;
    V m = lowest();
    Mask none = S::first(S::width);
    each(
        t, begin, end, MULTIMAX_EACH {
          V x = x_.load(i, part);
          V s = S::select(masked(x, floor, part), lowest(), sigma(f, x));
          none = S::both(none, S::le(s, lowest()));
          m = S::max(s, m);
          work.store(i, s, part);
        });
    tops[r] = m;
    empty[r] = none;
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

// multimax and log_multimax
template <Kind kind>
struct Forward {
  const Params<C>& params;
  decltype(&modulate<0>) modulate;  // of the order at hand

  static V finite(V top) { return S::select(S::le(top, lowest()), V{}, top); }

  // each lane's sum of exp(work - base), and, for multimax, work = that exp
  static void exponentiate(const Tile& t, int64_t begin, int64_t end, V base, V& total) {
    const auto work = t.work;
    total = V{};
    for (; begin < end; begin += sum_every) {
      V sum{};
      each(
          t, begin, min(begin + sum_every, end), MULTIMAX_EACH {
            V s = work.load(i, part) - base;
            if constexpr (same<decltype(part), Part>) s = S::select(S::first(part.n), s, lowest());
            V e = exp<S>(s);
            sum = sum + e;
            if constexpr (kind == Kind::multimax) work.store(i, e, part);
          });
      total = total + sum;
    }
  }

  // multimax: out = work * norm; log_multimax: out = (work - top) - norm
  static void normalise(const Tile& t, int64_t begin, int64_t end, V top, V norm) {
    const auto work = t.work;
    const auto out = t.out;
    each(
        t, begin, end, MULTIMAX_EACH {
          V s = work.load(i, part);
          out.store(i, kind == Kind::multimax ? s * norm : (s - top) - norm, part);
        });
    if (S::any(S::nan(norm))) {  // a NaN in the row: entries that are masked stay so all the same
      each(
          t, begin, end, MULTIMAX_EACH {
            Mask off = masked(t.x.load(i, part), S::set(masked_floor<T>), part);
            V off_value = kind == Kind::multimax ? V{} : lowest();
            t.out.store(i, S::select(off, off_value, t.out.load(i, part)), part);
          });
    }
  }

  // 1 / total or log total; 0 for an empty row
  static V norm_of(V total, Mask empty) {
    V norm;
    if constexpr (kind == Kind::multimax) {
      norm = static_cast<C>(1) / total;
    } else {
      norm = log_lanes(total);
    }
    return S::select(empty, V{}, norm);
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
    Mask empty[batch_rows];
    modulate(tiles, rows, 0, tiles[0].vectors(), params, top, empty);
    for (int r = 0; r < rows; ++r) {
      if (!columns) top[r] = S::set(S::max(top[r]));
      top[r] = finite(top[r]);
    }
    for (int r = 0; r < rows; ++r) exponentiate(tiles[r], 0, tiles[r].vectors(), top[r], total[r]);
    for (int r = 0; r < rows; ++r) {
      if (!columns) total[r] = S::set(S::sum(total[r]));
      if (!columns && !S::all(empty[r])) empty[r] = Mask{};
      total[r] = norm_of(total[r], empty[r]);
      keep(tiles[r], top[r], total[r]);
    }
    for (int r = 0; r < rows; ++r) normalise(tiles[r], 0, tiles[r].vectors(), top[r], total[r]);
  }

  void long_row(const Tile& t, V* segment_tops) const {
    V top = lowest(), total{};
    Mask empty = S::first(S::width);
    for (int64_t begin = 0; begin < t.vectors(); begin += segment) {
      int64_t end = min(begin + segment, t.vectors());
      V m, sum;
      Mask none;
      modulate(&t, 1, begin, end, params, &m, &none);
      if (!t.columns) m = S::set(S::max(m));
      exponentiate(t, begin, end, finite(m), sum);
      if (!t.columns) sum = S::set(S::sum(sum));
      segment_tops[begin / segment] = m;
      V higher = S::max(m, top);
      total = total * exp<S>(top - finite(higher)) + sum * exp<S>(m - finite(higher));
      top = higher;
      empty = S::both(empty, none);
    }
    if (!t.columns && !S::all(empty)) empty = Mask{};
    top = finite(top);
    V norm = norm_of(total, empty);
    keep(t, top, norm);
    for (int64_t begin = 0; begin < t.vectors(); begin += segment) {
      // multimax: the exp was taken relative to the segment's own maximum
      V factor = kind == Kind::multimax ? norm * exp<S>(segment_tops[begin / segment] - top) : norm;
      normalise(t, begin, min(begin + segment, t.vectors()), top, factor);
    }
  }

  void run(const Tile* tiles, int rows, V* segment_tops) const {
    if (tiles[0].vectors() <= segment) {
      short_rows(tiles, rows);
    } else {
      long_row(tiles[0], segment_tops);
    }
  }
};

}  // namespace
}  // namespace multimax::MULTIMAX_ISA
