// The kernels of sparsemax and entmax15. Compiled once for each instruction set, like rows.cpp, and as free of the C++
// library as that.
#include "entmax.h"

#include "memory.h"

namespace multimax::MULTIMAX_ISA {
namespace {

// Within this many vectors a sum is carried in the compute type, beyond in double.
constexpr int64_t sum_every = 32;
// Newton's method needs no more: see threshold().
constexpr int max_steps = 200;

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

// The body is given where a vector begins, and how many of its lanes there are.
template <class S, class Body>
MULTIMAX_INLINE void each(int64_t begin, int64_t end, Body body) {
  int64_t i = begin;
  for (; i + S::width <= end; i += S::width) body(i, Whole{});
  if (i < end) body(i, Part{static_cast<int>(end - i)});
}

#define MULTIMAX_EACH [&](int64_t i, auto part) __attribute__((always_inline))

template <class S, class T, Entmax kind>
struct Row {
  using C = typename S::T;
  using V = typename S::V;
  using Mask = decltype(S::first(0));
  using M = Memory<S, T>;

  static C infinity() { return -minus_infinity<C>(); }

  const T* x;
  int64_t length;
  V floor;

  static V load(const T* p, Whole) { return M::load(p); }
  static V load(const T* p, Part part) { return M::load(p, part.n); }
  static void store(T* p, V a, Whole) { M::store(p, a); }
  static void store(T* p, V a, Part part) { M::store(p, a, part.n); }
  static Mask there(Whole) { return S::first(S::width); }
  static Mask there(Part part) { return S::first(part.n); }

  static V shifted(V x, V top) { return kind == Entmax::sparsemax ? x - top : (x - top) * static_cast<C>(0.5); }

  // The largest entry, -inf if there is none; NaN if there is a NaN, or nothing finite to measure from.
  C largest() const {
    V top = S::set(minus_infinity<C>());
    Mask bad = S::first(0);
    each<S>(
        0, length, MULTIMAX_EACH {
          V a = load(x + i, part);
          if constexpr (same<decltype(part), Part>) a = S::select(there(part), a, top);
          bad = S::either(bad, S::nan(a));
          top = S::max(a, top);
        });
    C result = S::max(top);
    return S::any(bad) || result == infinity() ? static_cast<C>(__builtin_nan("")) : result;
  }

  // Those u that can be above tau, which is at least -1: a row's largest u is 0, and y of nothing exceeds 1.
  int64_t candidates(V top, C* u) const {
    const V least = S::set(-1);
    int64_t n = 0;
    each<S>(
        0, length, MULTIMAX_EACH {
          V a = shifted(load(x + i, part), top);
          Mask above = S::both(S::lt(least, a), there(part));
          if (S::any(above)) n += S::compress(u + n, above, a);
        });
    return n;
  }

  // The tau for which the norm of r, the sum of r (sparsemax) or the root of the sum of r^2 (entmax15), is 1, by
  // Newton's method from below. The norm is convex and falls with tau, so no step goes too far, and from one step to
  // the next norm - 1 or the slope falls to a half at least: both cannot go on for longer than a number has bits.
  static C threshold(const C* u, int64_t n) {
    C tau = -1;
    for (int step = 0; step < max_steps; ++step) {
      const V t = S::set(tau);
      double first[S::width] = {}, second[S::width] = {};
      for (int64_t begin = 0; begin < n; begin += sum_every * S::width) {
        V a{}, b{};
        each<S>(
            begin, min(begin + sum_every * S::width, n), MULTIMAX_EACH {
              V r;
              if constexpr (same<decltype(part), Part>) {
                r = S::load(u + i, part.n) - t;
                r = S::select(there(part), r, V{});
              } else {
                r = S::load(u + i) - t;
              }
              if constexpr (kind == Entmax::sparsemax) {
                b = S::add_where(S::lt(V{}, r), b, S::set(1));
                a = a + S::max(r, V{});
              } else {
                r = S::max(r, V{});
                a = a + r * r;
                b = b + r;
              }
            });
        S::add_to(first, a);
        S::add_to(second, b);
      }
      double f = 0, slope = 0;
      for (int i = 0; i < S::width; ++i) {
        f += first[i];
        slope += second[i];
      }
      double norm = kind == Entmax::sparsemax ? f : __builtin_sqrt(f);
      double change = (norm - 1) / slope * (kind == Entmax::sparsemax ? 1 : norm);
      C next = static_cast<C>(static_cast<double>(tau) + change);
      // the last step may well go back, by what rounding had taken too far
      if (!(next > tau)) return next;
      tau = next;
    }
    return tau;
  }

  // NaN everywhere but where entries are masked
  void fill_nan(T* out) const {
    const V nan = S::set(static_cast<C>(__builtin_nan("")));
    each<S>(0, length, MULTIMAX_EACH { store(out + i, S::zero_if(S::le(load(x + i, part), floor), nan), part); });
  }

  void forward(T* out, C* stats, C* u) const {
    C top = largest();
    if (top != top) {
      stats[0] = 0;
      stats[1] = top;
      return fill_nan(out);
    }
    if (!(top > floor[0])) {
      stats[0] = 0;
      stats[1] = infinity();
      each<S>(0, length, MULTIMAX_EACH { store(out + i, V{}, part); });
      return;
    }
    const V t = S::set(top);
    C tau = threshold(u, candidates(t, u));
    stats[0] = top;
    stats[1] = tau;
    const V tau_ = S::set(tau);
    each<S>(
        0, length, MULTIMAX_EACH {
          V r = S::max(shifted(load(x + i, part), t) - tau_, V{});
          store(out + i, kind == Entmax::sparsemax ? r : r * r, part);
        });
  }

  // With w the derivative of y by u, up to a constant: 1 on the support (sparsemax) or r (entmax15),
  // dx = w (grad - sum(w grad) / sum(w)).
  void backward(const T* grad, const C* stats, T* out) const {
    if (stats[1] != stats[1]) return fill_nan(out);
    const V top = S::set(stats[0]), tau = S::set(stats[1]);
    auto weight = [&](int64_t i, auto part, Mask& on) __attribute__((always_inline)) {
      V r = shifted(load(x + i, part), top) - tau;
      on = S::both(S::lt(V{}, r), there(part));
      return kind == Entmax::sparsemax ? S::set(1) : r;
    };
    double dots[S::width] = {}, totals[S::width] = {};
    for (int64_t begin = 0; begin < length; begin += sum_every * S::width) {
      V dot{}, total{};
      each<S>(
          begin, min(begin + sum_every * S::width, length), MULTIMAX_EACH {
            Mask on;
            V w = weight(i, part, on);
            if (!S::any(on)) return;
            dot = S::add_where(on, dot, w * load(grad + i, part));
            total = S::add_where(on, total, w);
          });
      S::add_to(dots, dot);
      S::add_to(totals, total);
    }
    double dot = 0, total = 0;
    for (int i = 0; i < S::width; ++i) {
      dot += dots[i];
      total += totals[i];
    }
    const V mean = S::set(static_cast<C>(dot / total));  // no support: nothing of it is used
    each<S>(
        0, length, MULTIMAX_EACH {
          Mask on;
          V w = weight(i, part, on);
          store(out + i, S::select(on, w * (load(grad + i, part) - mean), V{}), part);
        });
  }
};

template <bool backward, class T, Entmax kind>
void run(const EntmaxJob& job, int64_t first, int64_t last, void* scratch) {
  using S = Simd<typename Compute<T>::type>;
  using C = typename S::T;
  for (int64_t row = first; row < last; ++row) {
    int64_t at = row * job.length;
    T* out = static_cast<T*>(job.out) + at;
    C* stats = static_cast<C*>(job.stats) + 2 * row;
    const Row<S, T, kind> own{static_cast<const T*>(job.x) + at, job.length, S::set(static_cast<C>(job.floor))};
    if constexpr (backward) {
      own.backward(static_cast<const T*>(job.grad) + at, stats, out);
    } else {
      own.forward(out, stats, static_cast<C*>(scratch));
    }
  }
}

template <bool backward, class T>
void run(const EntmaxJob& job, int64_t first, int64_t last, void* scratch) {
  if (job.kind == Entmax::sparsemax) return run<backward, T, Entmax::sparsemax>(job, first, last, scratch);
  run<backward, T, Entmax::entmax15>(job, first, last, scratch);
}

template <bool backward>
void run(const EntmaxJob& job, int64_t first, int64_t last, void* scratch) {
  switch (job.dtype) {
    case DType::f32:
      return run<backward, float>(job, first, last, scratch);
    case DType::f64:
      return run<backward, double>(job, first, last, scratch);
    case DType::bf16:
      return run<backward, bf16>(job, first, last, scratch);
    case DType::f16:
      return run<backward, f16>(job, first, last, scratch);
  }
}

// The candidates; a whole vector is written where they end.
int64_t scratch_bytes(const EntmaxJob& job) {
  if (job.dtype == DType::f64) return (job.length + Simd<double>::width) * static_cast<int64_t>(sizeof(double));
  return (job.length + Simd<float>::width) * static_cast<int64_t>(sizeof(float));
}

}  // namespace

const EntmaxKernels entmax_kernels = {scratch_bytes, run<false>, run<true>};

}  // namespace multimax::MULTIMAX_ISA
