// The forward of an item: sigma and its maximum, exp and its sum, the weights.
#pragma once

#include "rows/item.h"

namespace multimax::MULTIMAX_ISA {
namespace {  // part of rows.cpp

template <class S, class T, int N, Kind kind>
struct Forward {
  using C = typename S::T;
  using V = typename S::V;
  using Mask = decltype(S::first(0));
  using Item = Tile<S, T>;

  const Vectors<S, N>& f;
  V floor;

  static V lowest() { return S::set(minus_infinity<C>()); }
  static V finite(V top) { return S::select(S::le(top, lowest()), V{}, top); }

  // work = sigma(x), -inf where masked; each lane's maximum; which lanes hold nothing but masked entries
  void modulate(const Item& t, int64_t begin, int64_t end, V& top, Mask& empty) const {
    const auto x_ = t.x;
    const auto work = t.work;
    const Vectors<S, N> f = this->f;
    const V floor = this->floor;
    V m = lowest();
    Mask none = S::first(S::width);
    each(
        t, begin, end, MULTIMAX_EACH {
          V x = x_.load(i, part);
          Mask off = masked<S>(x, floor, part);
          V s = S::select(off, lowest(), sigma(f, x));
          none = S::both(none, off);
          m = S::max(s, m);
          work.store(i, s, part);
        });
    top = m;
    empty = none;
  }

  // each lane's sum of exp(work - base), and, for multimax, work = that exp
  void exponentiate(const Item& t, int64_t begin, int64_t end, V base, V& total) const {
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
  void normalise(const Item& t, int64_t begin, int64_t end, V top, V norm) const {
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
            Mask off = masked<S>(t.x.load(i, part), floor, part);
            V off_value = kind == Kind::multimax ? V{} : lowest();
            t.out.store(i, S::select(off, off_value, t.out.load(i, part)), part);
          });
    }
  }

  // sigma alone; masked entries pass through unchanged
  void modulate_only(const Item& t) const {
    const auto x_ = t.x, out = t.out;
    const Vectors<S, N> f = this->f;
    const V floor = this->floor;
    each(
        t, 0, t.vectors(), MULTIMAX_EACH {
          V x = x_.load(i, part);
          out.store(i, S::select(S::le(x, floor), x, sigma(f, x)), part);
        });
  }

  // 1 / total or log total; 0 for an empty row. Where the row is not empty but sigma of all that takes part overflowed
  // to -inf, total is 0 and the result NaN, as it should be.
  static V norm_of(V total, Mask empty) {
    V norm;
    if constexpr (kind == Kind::multimax) {
      norm = static_cast<C>(1) / total;
    } else {
      norm = log_lanes<S>(total);
    }
    return S::select(empty, V{}, norm);
  }

  static void keep(const Item& t, V top, V norm) {
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

  void short_rows(const Item* tiles, int rows) const {
    const bool columns = tiles[0].columns;
    V top[batch_rows], total[batch_rows];
    Mask empty[batch_rows];
    for (int r = 0; r < rows; ++r) modulate(tiles[r], 0, tiles[r].vectors(), top[r], empty[r]);
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

  void long_row(const Item& t, V* segment_tops) const {
    V top = lowest(), total{};
    Mask empty = S::first(S::width);
    for (int64_t begin = 0; begin < t.vectors(); begin += segment) {
      int64_t end = min(begin + segment, t.vectors());
      V m, sum;
      Mask none;
      modulate(t, begin, end, m, none);
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

  void run(const Item* tiles, int rows, V* segment_tops) const {
    if constexpr (kind == Kind::modulate) {
      for (int r = 0; r < rows; ++r) modulate_only(tiles[r]);
    } else if (tiles[0].vectors() <= segment) {
      short_rows(tiles, rows);
    } else {
      long_row(tiles[0], segment_tops);
    }
  }
};

}  // namespace
}  // namespace multimax::MULTIMAX_ISA
