// The kernels of entmax. Compiled once for each instruction set and dtype, with MULTIMAX_ISA and MULTIMAX_DTYPE naming
// them.
#include "entmax/entmax.h"

#include "simd/sigma.h"
#include "simd/types.h"

namespace multimax::MULTIMAX_ISA {
namespace {

// Within this many vectors a sum is carried in the compute type, beyond in double.
constexpr int64_t sum_every = 32;
// Newton's method needs no more: see threshold().
constexpr int max_steps = 200;

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

// The body is given where a vector begins, and which of its lanes there are.
template <class Body>
MULTIMAX_INLINE void each(int64_t begin, int64_t end, Body body) {
  int64_t i = begin;
  for (; i + S::width <= end; i += S::width) body(i, Whole{});
  if (i < end) body(i, Part{static_cast<int>(end - i)});
}

#define MULTIMAX_EACH [&](int64_t i, auto part) __attribute__((always_inline))

MULTIMAX_INLINE Mask there(Whole) { return S::first(S::width); }
MULTIMAX_INLINE Mask there(Part part) { return S::first(part.n); }

// Sums over all vectors of [0, n): the body adds to those it is given.
template <int count, class Body>
MULTIMAX_INLINE void sums(int64_t n, double (&totals)[count], Body body) {
  double lanes[count][S::width] = {};
  for (int64_t begin = 0; begin < n; begin += sum_every * S::width) {
    V sum[count] = {};
    each(begin, min(begin + sum_every * S::width, n), MULTIMAX_EACH { body(i, part, sum); });
    for (int j = 0; j < count; ++j) S::add_to(lanes[j], sum[j]);
  }
  for (int j = 0; j < count; ++j) {
    totals[j] = 0;
    for (int i = 0; i < S::width; ++i) totals[j] += lanes[j][i];
  }
}

// Of u's that lie one after the other; what is not there is far below.
MULTIMAX_INLINE V load_u(const C* u, Whole) { return S::load(u); }
MULTIMAX_INLINE V load_u(const C* u, Part part) {
  return S::select(S::first(part.n), S::load(u, part.n), S::set(minus_infinity<C>()));
}

// sparsemax and entmax15. A law says how u comes of x, above which u an entry can be in the support at all, what tau
// is, and of each u its weight and the weight's derivative.
template <Entmax kind>
struct Projection {
  static constexpr bool linear = kind == Entmax::sparsemax;
  static constexpr C unit = linear ? 1 : static_cast<C>(0.5);

  explicit Projection(C) {}
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
        V r = S::max(load_u(u + i, part) - t, V{});
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
  static constexpr C unit = 1;

  C a;        // alpha - 1
  bool near;  // alpha near 1

  // y = r^(1 / a), and its derivative y^(2 - alpha) is y / r. r is 1 at the largest entry if that takes everything, and
  // length^-a there if all are equal. For small a both are close to 1: so r = 1 + a (u - tau), whose logarithm is taken
  // without 1. For larger a, r may be tiny: so r = a u + tau, with tau itself as small.
  explicit AnyAlpha(C alpha) : a(alpha - 1), near(alpha < static_cast<C>(1.25)) {}
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
      V y = power(load_u(u + i, part), t, r, log_r, on);
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
struct Row {
  using M = Memory<S, T>;

  const T* x;
  int64_t length;
  Law law;

  static V floor() { return S::set(masked_floor<T>); }

  static C infinity() { return -minus_infinity<C>(); }
  static V load(const T* p, Whole) { return M::load(p); }
  static V load(const T* p, Part part) { return M::load(p, part.n); }
  static void store(T* p, V a, Whole) { M::store(p, a); }
  static void store(T* p, V a, Part part) { M::store(p, a, part.n); }

  static V shifted(V x, V top) { return Law::unit == 1 ? x - top : (x - top) * Law::unit; }

  // The largest entry, -inf if there is none; NaN if there is a NaN, or nothing finite to measure from.
  C largest() const {
    V top = S::set(minus_infinity<C>());
    Mask bad = S::first(0);
    each(
        0, length, MULTIMAX_EACH {
          V a = load(x + i, part);
          if constexpr (same<decltype(part), Part>) a = S::select(there(part), a, top);
          bad = S::either(bad, S::nan(a));
          top = S::max(a, top);
        });
    C result = S::max(top);
    return S::any(bad) || result == infinity() ? static_cast<C>(__builtin_nan("")) : result;
  }

  int64_t candidates(V top, C* u) const {
    const V least = S::set(law.least());
    int64_t n = 0;
    each(
        0, length, MULTIMAX_EACH {
          V a = shifted(load(x + i, part), top);
          Mask above = S::both(S::lt(least, a), there(part));
          if (S::any(above)) n += S::compress(u + n, above, a);
        });
    return n;
  }

  // NaN everywhere but where entries are masked
  void fill_nan(T* out) const {
    const V nan = S::set(static_cast<C>(__builtin_nan("")));
    each(0, length, MULTIMAX_EACH { store(out + i, S::zero_if(S::le(load(x + i, part), floor()), nan), part); });
  }

  void forward(T* out, C* stats, C* u) const {
    C top = largest();
    if (top != top) {
      stats[0] = 0;
      stats[1] = top;
      return fill_nan(out);
    }
    if (!(top > masked_floor<T>)) {
      stats[0] = 0;
      stats[1] = law.nothing();
      each(0, length, MULTIMAX_EACH { store(out + i, V{}, part); });
      return;
    }
    const V t = S::set(top);
    stats[0] = top;
    stats[1] = law.threshold(u, candidates(t, u), length);
    const V tau = S::set(stats[1]);
    each(0, length, MULTIMAX_EACH { store(out + i, law.weight(shifted(load(x + i, part), t), tau), part); });
  }

  // With w the weights' derivative by u: dx = w (grad - sum(w grad) / sum(w)), and, with h that by alpha,
  // dalpha = sum(h grad) - sum(h) sum(w grad) / sum(w).
  template <bool with_alpha>
  void backward(const T* grad, const C* stats, T* out, C* grad_alpha) const {
    if (stats[1] != stats[1]) {
      if constexpr (with_alpha) *grad_alpha = stats[1];
      return fill_nan(out);
    }
    const V top = S::set(stats[0]), tau = S::set(stats[1]);
    double total[with_alpha ? 4 : 2];
    sums(length, total, [&](int64_t i, auto part, V* sum) __attribute__((always_inline)) {
      V u = shifted(load(x + i, part), top), w, h;
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
      if constexpr (with_alpha) {
        sum[2] = S::add_where(on, sum[2], h * g);
        sum[3] = S::add_where(on, sum[3], h);
      }
    });
    double mean = total[1] == 0 ? 0 : total[0] / total[1];  // no support: nothing of it is used
    if constexpr (with_alpha) *grad_alpha = static_cast<C>(total[2] - total[3] * mean);
    const V m = S::set(static_cast<C>(mean));
    each(
        0, length, MULTIMAX_EACH {
          Mask on;
          V w = law.derivative(shifted(load(x + i, part), top), tau, on);
          store(out + i, S::select(on, w * (load(grad + i, part) - m), V{}), part);
        });
  }
};

template <bool backward, class Law>
void run_rows(const EntmaxJob& job, int64_t first, int64_t last, void* scratch) {
  constexpr bool any_alpha = same<Law, AnyAlpha>;
  for (int64_t row = first; row < last; ++row) {
    int64_t at = row * job.length;
    T* out = static_cast<T*>(job.out) + at;
    C* stats = static_cast<C*>(job.stats) + 2 * row;
    const Law law(any_alpha ? static_cast<const C*>(job.alpha)[row] : 0);
    const Row<Law> entries{static_cast<const T*>(job.x) + at, job.length, law};
    if constexpr (!backward) {
      entries.forward(out, stats, static_cast<C*>(scratch));
    } else {
      const T* grad = static_cast<const T*>(job.grad) + at;
      if constexpr (any_alpha) {
        if (job.grad_alpha != nullptr) {
          entries.template backward<true>(grad, stats, out, static_cast<C*>(job.grad_alpha) + row);
          continue;
        }
      }
      entries.template backward<false>(grad, stats, out, nullptr);
    }
  }
}

template <bool backward>
void run(const EntmaxJob& job, int64_t first, int64_t last, void* scratch) {
  switch (job.kind) {
    case Entmax::sparsemax:
      return run_rows<backward, Projection<Entmax::sparsemax>>(job, first, last, scratch);
    case Entmax::entmax15:
      return run_rows<backward, Projection<Entmax::entmax15>>(job, first, last, scratch);
    case Entmax::any_alpha:
      return run_rows<backward, AnyAlpha>(job, first, last, scratch);
  }
}

// The candidates; a whole vector is written where they end.
int64_t scratch_bytes(const EntmaxJob& job) { return (job.length + S::width) * static_cast<int64_t>(sizeof(C)); }

}  // namespace

const EntmaxKernels MULTIMAX_OF_DTYPE(entmax_kernels) = {scratch_bytes, run<false>, run<true>};

}  // namespace multimax::MULTIMAX_ISA
