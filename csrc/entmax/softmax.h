// Softmax at a temperature, or of some of the entries: of those at or above the mean, or of the largest.
#pragma once

#include "entmax/select.h"

namespace multimax::MULTIMAX_ISA {
namespace {

constexpr bool has_y = same<T, C>;

template <class C>
struct Normal;  // numbers
template <>
struct Normal<float> {
  static constexpr float least = 0x1p-126f, largest = 0x1.fffffep127f;
};
template <>
struct Normal<double> {
  static constexpr double least = 0x1p-1022, largest = 0x1.fffffffffffffp1023;
};

// What the softmax of a row is of, and its result up to a factor.
struct Chosen {
  C top, norm;    // the largest entry, and 1 / the sum of exp((x - top) / T)
  C limit;        // evsoftmax: the mean of x - top; the largest: what they are at or above
  int64_t after;  // the largest: of entries equal to the limit, those from here on do not belong to them

  void keep(C* stats) const {
    stats[0] = top;
    stats[1] = norm;
    stats[2] = limit;
    stats[3] = bit_cast<C>(static_cast<Key>(after));  // a float counts to 2^24 only
  }
  static Chosen of(const C* stats) { return {stats[0], stats[1], stats[2], bit_cast<Key>(stats[3])}; }
};

template <Entmax kind>
struct Softmax : Row {
  static constexpr bool of_largest = kind == Entmax::topk || kind == Entmax::topshare;

  double option;
  C scale;  // 1 / T

  Softmax(Row row, double option, double temperature) : Row(row), option(option), scale(1) {
    if constexpr (kind == Entmax::softmax) {
      double s = 1 / temperature;  // 0 times what overflowed would be NaN
      if (s < static_cast<double>(Normal<C>::least)) s = static_cast<double>(Normal<C>::least);
      if (s > static_cast<double>(Normal<C>::largest)) s = static_cast<double>(Normal<C>::largest);
      scale = static_cast<C>(s);
    }
  }

  // The weights, up to a factor, and their sum.
  double exponentiate(const Chosen& chosen, C* weights) const {
    const V top = S::set(chosen.top), limit = S::set(chosen.limit), low = floor(), factor = S::set(scale);
    const V lowest = S::set(minus_infinity<C>());
    const bool all = kind == Entmax::evsoftmax && option > 0;  // those below the mean have a part too
    const V part_of_low = S::set(static_cast<C>(option / (1 + option)));
    double total[1];
    sums(length, total, [&](int64_t i, auto part, V* sum) __attribute__((always_inline)) {
      V a = load(x + i, part), u = a - top;
      Mask on = of_largest ? S::le(limit, a) : S::lt(low, a);
      if constexpr (same<decltype(part), Part>) on = S::both(on, there(part));
      if constexpr (kind == Entmax::softmax) u = u * factor;
      V e;
      if constexpr (kind == Entmax::evsoftmax) {
        Mask high = S::le(limit, u);
        e = exp<S>(S::select(all ? on : S::both(on, high), u, lowest));
        if (all) e = S::select(high, e, e * part_of_low);
      } else {
        e = exp<S>(S::select(on, u, lowest));
      }
      store(weights + i, e, part);
      sum[0] = sum[0] + e;
    });
    return total[0];
  }

  // The mean of x - top: rounding cannot lift the mean of numbers that are never positive above all of them.
  C mean(V top) const {
    double total[2];
    sums(length, total, [&](int64_t i, auto part, V* sum) __attribute__((always_inline)) {
      V a = load(x + i, part);
      Mask on = S::both(S::lt(floor(), a), there(part));
      sum[0] = S::add_where(on, sum[0], a - top);
      sum[1] = S::add_where(on, sum[1], S::set(1));
    });
    return static_cast<C>(total[0] / total[1]);
  }

  // The edge of the largest entries; the largest of each lane are a bound for as many as there are lanes.
  Edge edge(V tops, C top, C* numbers) const {
    int64_t most = min(static_cast<int64_t>(option < 1e18 ? option : 1e18), length);
    C low = masked_floor<T>;
    if (kind == Entmax::topk && most <= S::width && -S::max(-tops) > low) low = before(-S::max(-tops));
    const V l = S::set(low);
    int64_t n = 0;
    each(
        0, length, MULTIMAX_EACH {
          V a = load(x + i, part);
          Mask on = S::both(S::lt(l, a), there(part));
          if (S::any(on)) n += S::compress(numbers + n, on, a);
        });
    if constexpr (kind == Entmax::topshare) {
      // a share of 0.07 of 100 entries is 7, however the product rounds
      most = static_cast<int64_t>(__builtin_ceil(option * static_cast<double>(n) - 1e-9));
      if (most < 1) most = 1;
    }
    return edge_of_largest(numbers, n, min(most, n), low, top);
  }

  // Where the first so many of equal entries end.
  int64_t after_first(C value, int64_t count) const {
    const V v = S::set(value);
    C equal[S::width];
    for (int64_t i = 0; i < length; i += S::width) {
      const Part part{static_cast<int>(min(length - i, S::width))};
      V a = load(x + i, part);
      int n = S::compress(equal, S::both(S::both(S::le(a, v), S::le(v, a)), there(part)), a);
      if (n < count) {
        count -= n;
        continue;
      }
      S::store(equal, a);
      for (int lane = 0;; ++lane) {
        if (equal[lane] == value && --count == 0) return i + lane + 1;
      }
    }
    return length;
  }

  // A copy of the row in which entries equal to the limit are masked from `after` on.
  void without_ties(const Chosen& chosen, T* entries) {
    const V value = S::set(chosen.limit), lowest = S::set(minus_infinity<C>());
    if (x != entries) __builtin_memcpy(entries, x, static_cast<size_t>(chosen.after) * sizeof(T));
    each(
        chosen.after, length, MULTIMAX_EACH {
          V a = load(x + i, part);
          store(entries + i, S::select(S::both(S::le(a, value), S::le(value, a)), lowest, a), part);
        });
    x = entries;
  }

  void forward(T* out, C* stats, const Scratch& scratch) {
    V tops;
    Chosen chosen{largest(tops), 0, infinity(), length};
    if (!(chosen.top > masked_floor<T>)) {  // nothing, or NaN
      chosen.norm = chosen.top != chosen.top ? chosen.top : 0;
      chosen.top = 0;
      chosen.keep(stats);
      return fill(out, chosen.norm);
    }
    if constexpr (kind == Entmax::evsoftmax) chosen.limit = mean(S::set(chosen.top));
    if constexpr (of_largest) {
      Edge found = edge(tops, chosen.top, scratch.numbers);
      chosen.limit = found.least;
      if (found.ties >= 0) {
        chosen.after = after_first(found.least, found.ties);
        without_ties(chosen, scratch.entries);
      }
    }
    chosen.norm = static_cast<C>(1 / exponentiate(chosen, scratch.numbers));
    chosen.keep(stats);
    const V norm = S::set(chosen.norm);
    const C* weights = scratch.numbers;
    each(0, length, MULTIMAX_EACH { store(out + i, load(weights + i, part) * norm, part); });
  }

  // dx = y (grad - sum(y grad)) / T, and dT = -sum(dx (x - top)) / T, as dx sums to 0.
  template <bool with_temperature>
  void backward(const T* grad, const C* stats, const T* saved, T* out, C* grad_temperature, const Scratch& scratch) {
    const Chosen chosen = Chosen::of(stats);
    const C* y;
    if constexpr (has_y) {
      y = reinterpret_cast<const C*>(saved);  // the same type; Clang looks at it where it is not
    } else {
      if (chosen.norm != chosen.norm) {
        if constexpr (with_temperature) *grad_temperature = chosen.norm;
        return fill(out, chosen.norm);
      }
      if (of_largest && chosen.after < length) without_ties(chosen, scratch.entries);
      exponentiate(chosen, scratch.numbers);
      y = scratch.numbers;
    }
    // what has no weight has no part in anything, whatever its gradient
    double total[1];
    sums(length, total, [&](int64_t i, auto part, V* sum) __attribute__((always_inline)) {
      V p = load(y + i, part);
      sum[0] = S::add_where(S::lt(V{}, p), sum[0], p * load(grad + i, part));
    });
    const C norm = has_y ? 1 : chosen.norm;
    const V dot = S::set(static_cast<C>(total[0]) * norm), factor = S::set(norm * scale);
    auto gradient = [&](int64_t i, auto part) __attribute__((always_inline)) {
      V p = load(y + i, part);
      V d = S::zero_if(S::le(p, V{}), p * (load(grad + i, part) - dot) * factor);
      store(out + i, d, part);
      return d;
    };
    if constexpr (with_temperature) {
      const V top = S::set(chosen.top);
      sums(length, total, [&](int64_t i, auto part, V* sum) __attribute__((always_inline)) {
        V d = gradient(i, part);
        sum[0] = S::add_where(S::lt(V{}, load(y + i, part)), sum[0], d * (load(x + i, part) - top));
      });
      *grad_temperature = chosen.norm != chosen.norm ? nan() : static_cast<C>(-total[0] * static_cast<double>(scale));
    } else {
      each(0, length, MULTIMAX_EACH { gradient(i, part); });
    }
  }
};

}  // namespace
}  // namespace multimax::MULTIMAX_ISA
