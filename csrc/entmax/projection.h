// The functions that project on the simplex: sparsemax, entmax and Sparsehourglass.
#pragma once

#include "entmax/row.h"

namespace multimax::MULTIMAX_ISA {
namespace {

// Newton's method needs no more: see threshold().
constexpr int max_steps = 200;

// sparsemax and entmax15. A law says how u comes of x, above which u an entry can be in the support at all, what tau
// is, and of each u its weight and the weight's derivative.
template <Entmax kind>
struct Projection {
  static constexpr bool linear = kind == Entmax::sparsemax;

  explicit Projection(C) {}
  V shifted(V x, V top) const { return linear ? x - top : (x - top) * static_cast<C>(0.5); }
  C least() const { return -1; }                      // the largest u is 0, and no weight exceeds 1
  C nothing() const { return -minus_infinity<C>(); }  // the tau of a row without entries

  // The tau for which the norm of r, the sum of r (sparsemax) or the root of the sum of r^2 (entmax15), is 1, by
  // Newton's method from below. The norm is convex and falls with tau, so no step goes too far, and from one step to
  // the next norm - 1 or the slope falls to a half at least: both cannot go on for longer than a number has bits.
  C threshold(const C* u, int64_t n, int64_t) const {
    C tau = -1;
    for (int step = 0; step < max_steps; ++step) {
      const V t = S::set(tau);
      double total[2];
      sums(n, total, [&](int64_t i, auto part, V* sum) __attribute__((always_inline)) {
        V r = S::max(load_or_lowest(u + i, part) - t, V{});
        sum[0] = sum[0] + (linear ? r : r * r);
        sum[1] = linear ? S::add_where(S::lt(V{}, r), sum[1], S::set(1)) : sum[1] + r;
      });
      double norm = linear ? total[0] : __builtin_sqrt(total[0]);
      C next = static_cast<C>(static_cast<double>(tau) + (norm - 1) / total[1] * (linear ? 1 : norm));
      // the last step may well go back, by what rounding had taken too far
      if (!(next > tau)) return next;
      tau = next;
    }
    return tau;
  }

  V weight(V u, V tau) const {
    V r = S::max(u - tau, V{});
    return linear ? r : r * r;
  }
  // up to a constant, which the backward does not need; not 0 on the support only
  V derivative(V u, V tau, Mask& on) const {
    V r = u - tau;
    on = S::lt(V{}, r);
    return linear ? S::set(1) : r;
  }
};

// Sparsemax of x times a factor, (1/q + K) / (|sum x| / q + K) for the K entries that take part.
struct Hourglass : Projection<Entmax::sparsemax> {
  C inverse_q, factor = 1, slope = 0;  // slope: the factor's derivative by the sum

  explicit Hourglass(C inverse_q) : Projection(0), inverse_q(inverse_q) {}
  V shifted(V x, V top) const { return (x - top) * S::set(factor); }

  void measure(const Row& row) {
    constexpr C small = static_cast<C>(1) / 64;  // so that not even the largest numbers overflow before they are folded
    double total[2];
    sums(row.length, total, [&](int64_t i, auto part, V* sum) __attribute__((always_inline)) {
      V a = load(row.x + i, part);
      Mask on = S::both(S::lt(Row::floor(), a), there(part));
      sum[0] = S::add_where(on, sum[0], a * small);
      sum[1] = S::add_where(on, sum[1], S::set(1));
    });
    double inverse = static_cast<double>(inverse_q), size = total[0] / static_cast<double>(small);
    double below = __builtin_fabs(size) * inverse + total[1], ratio = (inverse + total[1]) / below;
    factor = static_cast<C>(ratio);
    slope = size == 0 ? 0 : static_cast<C>(-ratio * inverse / below * (size < 0 ? -1 : 1));
  }
  void keep(C* stats) const {
    stats[2] = factor;
    stats[3] = slope;
  }
  void recall(const C* stats) {
    factor = stats[2];
    slope = stats[3];
  }
};

template <class C>
struct Smallest;  // normal number
template <>
struct Smallest<float> {
  static constexpr float value = 0x1p-126f;
};
template <>
struct Smallest<double> {
  static constexpr double value = 0x1p-1022;
};

struct AnyAlpha {
  C a;        // alpha - 1
  bool near;  // alpha near 1

  // y = r^(1 / a), and its derivative y^(2 - alpha) is y / r. r is 1 at the largest entry if that takes everything, and
  // length^-a there if all are equal. For small a both are close to 1: so r = 1 + a (u - tau), whose logarithm is taken
  // without 1. For larger a, r may be tiny: so r = a u + tau, with tau itself as small.
  explicit AnyAlpha(C alpha) : a(alpha - 1), near(alpha < static_cast<C>(1.25)) {}
  V shifted(V x, V top) const { return x - top; }
  C least() const { return -1 / a; }
  C nothing() const { return near ? -minus_infinity<C>() : minus_infinity<C>(); }

  // and the logarithm of r
  V power(V u, V tau, V& r, V& log_r, Mask& on) const {
    const V one = S::set(1);
    if (near) {
      V w = S::set(a) * (u - tau);
      on = S::lt(-one, w);
      w = S::select(on, w, V{});
      r = w + one;
      log_r = log1p<S>(w);
    } else {
      r = S::set(a) * u + tau;
      on = S::lt(V{}, r);
      r = S::select(on, r, one);
      log_r = log<S>(r);
    }
    return S::select(on, exp<S>(log_r / S::set(a)), V{});
  }

  void totals(const C* u, int64_t n, C tau, double (&total)[2]) const {
    const V t = S::set(tau);
    sums(n, total, [&](int64_t i, auto part, V* sum) __attribute__((always_inline)) {
      V r, log_r;
      Mask on;
      V y = power(load_or_lowest(u + i, part), t, r, log_r, on);
      sum[0] = sum[0] + y;
      sum[1] = sum[1] + y / r;
    });
  }

  // For alpha <= 2, as above, by Newton's method on the norm (sum of y)^a, which is convex in tau. For alpha > 2 it is
  // not, and the interval in which tau lies is halved, on a logarithmic scale as long as it is wide.
  C threshold(const C* u, int64_t n, int64_t length) const {
    double total[2], wide = static_cast<double>(a);
    if (a > 1) {
      C low = static_cast<C>(__builtin_exp(-wide * __builtin_log(static_cast<double>(length)))), high = 1;
      if (low < Smallest<C>::value) low = Smallest<C>::value;
      for (int step = 0; step < max_steps; ++step) {
        C middle =
            high > 4 * low
                ? static_cast<C>(__builtin_sqrt(static_cast<double>(low)) * __builtin_sqrt(static_cast<double>(high)))
                : low + (high - low) / 2;
        if (!(middle > low && middle < high)) break;
        totals(u, n, middle, total);
        (total[0] >= 1 ? high : low) = middle;
      }
      return high;
    }
    C tau = near ? 0 : 1;
    for (int step = 0; step < max_steps; ++step) {
      totals(u, n, tau, total);
      double change = -__builtin_expm1(-wide * __builtin_log(total[0])) * total[0] / total[1];
      C next = static_cast<C>(static_cast<double>(tau) + (near ? change / wide : -change));
      if (near ? !(next > tau) : !(next < tau)) return next;
      tau = next;
    }
    return tau;
  }

  V weight(V u, V tau) const {
    V r, log_r;
    Mask on;
    return power(u, tau, r, log_r, on);
  }
  V derivative(V u, V tau, Mask& on) const {
    V r, log_r;
    V y = power(u, tau, r, log_r, on);
    return y / r;
  }
  // The weight's derivative by alpha, up to a multiple of that by u, which the backward takes out: y (w / r - log r)
  // / a^2 with w = r - 1, or y (1 - log r) / a^2. For small w the two terms of the former are nearly equal; there
  // w / (1 + w) - log(1 + w) = -w^2 / 2 + 2 w^3 / 3 - 3 w^4 / 4 + ...
  V derivative_by_alpha(V u, V tau, V& by_u, Mask& on) const {
    V r, log_r;
    V y = power(u, tau, r, log_r, on);
    by_u = y / r;
    if (!near) return y * (S::set(1) - log_r) / S::set(a * a);
    V w = S::select(on, S::set(a) * (u - tau), V{});
    V series{};
    for (int k = 6; k >= 0; --k) series = series * w + static_cast<C>(k % 2 ? 1 : -1) * (k + 1) / (k + 2);
    constexpr C small = sizeof(C) == sizeof(float) ? static_cast<C>(0.1) : static_cast<C>(0.003);
    V both = S::select(S::lt(S::set(-small), w), series * w * w, w / r - log_r);
    return y * both / S::set(a * a);
  }
};

template <class Law>
struct Projected : Row {
  Law law;
  static constexpr bool scaled = same<Law, Hourglass>;

  Projected(Row row, Law law) : Row(row), law(law) {}

  int64_t candidates(V top, C* u) const {
    const V least = S::set(law.least());
    int64_t n = 0;
    each(
        0, length, MULTIMAX_EACH {
          V a = law.shifted(load(x + i, part), top);
          Mask above = S::both(S::lt(least, a), there(part));
          if (S::any(above)) n += S::compress(u + n, above, a);
        });
    return n;
  }

  void forward(T* out, C* stats, const Scratch& scratch) {
    V tops;
    C top = largest(tops);
    bool empty = !(top > masked_floor<T>);
    if constexpr (scaled) {
      if (!empty) law.measure(*this);
      law.keep(stats);
    }
    if (empty) {  // or NaN
      stats[0] = 0;
      stats[1] = top != top ? top : law.nothing();
      return fill(out, top != top ? top : 0);
    }
    const V t = S::set(top);
    stats[0] = top;
    stats[1] = law.threshold(scratch.numbers, candidates(t, scratch.numbers), length);
    const V tau = S::set(stats[1]);
    each(0, length, MULTIMAX_EACH { store(out + i, law.weight(law.shifted(load(x + i, part), t), tau), part); });
  }

  // With w the weights' derivative by u: dx = w (grad - sum(w grad) / sum(w)), and, with h that by alpha,
  // dalpha = sum(h grad) - sum(h) sum(w grad) / sum(w). Where u has a factor, x reaches the weights through it too:
  // with v = x - max x, which may stand for x as dx sums to 0, all that take part get slope sum(dx v) more.
  template <bool with_alpha>
  void backward(const T* grad, const C* stats, T* out, C* grad_alpha) {
    if (stats[1] != stats[1]) {
      if constexpr (with_alpha) *grad_alpha = stats[1];
      return fill(out, stats[1]);
    }
    if constexpr (scaled) law.recall(stats);
    const V top = S::set(stats[0]), tau = S::set(stats[1]);
    double total[with_alpha || scaled ? 4 : 2];
    sums(length, total, [&](int64_t i, auto part, V* sum) __attribute__((always_inline)) {
      V a = load(x + i, part), u = law.shifted(a, top), w, h;
      Mask on;
      if constexpr (with_alpha) {
        h = law.derivative_by_alpha(u, tau, w, on);
      } else {
        w = law.derivative(u, tau, on);
      }
      on = S::both(on, there(part));
      if (!S::any(on)) return;
      V g = load(grad + i, part);
      sum[0] = S::add_where(on, sum[0], w * g);
      sum[1] = S::add_where(on, sum[1], w);
      if constexpr (scaled) h = a - top;
      if constexpr (with_alpha || scaled) {
        sum[2] = S::add_where(on, sum[2], h * g);
        sum[3] = S::add_where(on, sum[3], h);
      }
    });
    double mean = total[1] == 0 ? 0 : total[0] / total[1];  // no support: nothing of it is used
    if constexpr (with_alpha) *grad_alpha = static_cast<C>(total[2] - total[3] * mean);
    const V m = S::set(static_cast<C>(mean));
    V factor{}, more{};
    if constexpr (scaled) {
      factor = S::set(law.factor);
      more = S::set(static_cast<C>(static_cast<double>(law.slope) * (total[2] - total[3] * mean)));
    }
    each(
        0, length, MULTIMAX_EACH {
          Mask on;
          V a = load(x + i, part), w = law.derivative(law.shifted(a, top), tau, on);
          V d = S::select(on, w * (load(grad + i, part) - m), V{});
          if constexpr (scaled) d = S::zero_if(S::le(a, floor()), d * factor + more);
          store(out + i, d, part);
        });
  }
};

}  // namespace
}  // namespace multimax::MULTIMAX_ISA
