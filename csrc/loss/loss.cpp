// The kernels of the loss's row part. Compiled once for each instruction set, with MULTIMAX_ISA naming it; uses nothing
// of the C++ library, since an inline function of it, compiled here for a newer machine, could end up in everybody's
// code.
#include "loss/loss.h"

#include "simd/memory.h"
#include "simd/sigma.h"
#include "simd/sums.h"

namespace multimax::MULTIMAX_ISA {
namespace {

// A row goes by segments that stay in the first-level cache from one loop to the next, and whose sums are carried in
// vectors: sums of `sum_every` vectors, sums of these, and beyond the segment double.
constexpr int64_t segment = 256;  // vectors
constexpr int64_t sum_every = 32;

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

// Calls body(i, first entry, how many entries) for the vectors of a row, the last of which may be cut short.
template <class S, class Body>
MULTIMAX_INLINE void each(int64_t begin, int64_t end, int64_t entries, Body body) {
  const int64_t whole = min(end, entries / S::width);
  for (int64_t i = begin; i < whole; ++i) body(i, i * S::width, S::width);
  if (whole < end) body(whole, whole * S::width, static_cast<int>(entries - whole * S::width));
}

#define MULTIMAX_EACH [&]([[maybe_unused]] int64_t i, int64_t at, [[maybe_unused]] int n) __attribute__((always_inline))

template <class S, class T>
MULTIMAX_INLINE typename S::V load(const T* from, int n) {
  return n == S::width ? Memory<S, T>::load(from) : Memory<S, T>::load(from, n);
}

template <class S, class T>
MULTIMAX_INLINE void store(T* to, typename S::V a, int n) {
  n == S::width ? Memory<S, T>::store(to, a) : Memory<S, T>::store(to, a, n);
}

// Which lanes are masked; those that are not there count as such.
template <class S>
MULTIMAX_INLINE auto masked(typename S::V x, typename S::V floor, int n) {
  return S::le(n == S::width ? x : S::select(S::first(n), x, floor), floor);
}

// q of one row, but for an index.
template <class S, class T>
struct Wanted {
  using C = typename S::T;
  using V = typename S::V;
  const T* narrow = nullptr;
  const C* wide = nullptr;
  const C* weight;
  V uniform, share;

  Wanted(const LossJob& job, int64_t row)
      : weight(static_cast<const C*>(job.weight)),
        uniform(S::set(static_cast<C>(job.uniform))),
        share(S::set(static_cast<C>(job.share))) {
    if (job.probabilities == nullptr) return;
    if (job.wide) {
      wide = static_cast<const C*>(job.probabilities) + row * job.probabilities_stride;
    } else {
      narrow = static_cast<const T*>(job.probabilities) + row * job.probabilities_stride;
    }
  }
  MULTIMAX_INLINE V at(int64_t i, int n) const {
    V q = uniform;
    if (wide != nullptr) q = q + share * load<S>(wide + i, n);
    if (narrow != nullptr) q = q + share * load<S>(narrow + i, n);
    if (weight != nullptr) q = q * load<S>(weight + i, n);
    return n == S::width ? q : S::select(S::first(n), q, V{});
  }
};

// The entry of a row that its index points to; -1 if it lies in another part of the row.
inline int64_t entry_of(const LossJob& job, int64_t row) {
  int64_t entry = job.target == nullptr ? -1 : job.target[row] - job.first_class;
  return entry < job.classes ? entry : -1;
}

inline bool ignored(const LossJob& job, int64_t row) {
  return job.target != nullptr && job.target[row] == job.ignore_index;
}

template <class S, class T, int N, bool Full>
struct Forward {
  using C = typename S::T;
  using V = typename S::V;

  const LossJob& job;
  const Vectors<S, N> f;
  V floor;
  C* work;  // (segment, width)

  static V lowest() { return S::set(minus_infinity<C>()); }

  void row(int64_t r) const {
    double* const stats = job.stats + r;
    const int64_t plane = job.rows;
    for (int j = 0; j < loss_planes; ++j) stats[j * plane] = 0;
    if (ignored(job, r)) return;
    const T* const x_ = static_cast<const T*>(job.x) + r * job.row_stride;
    const int64_t entries = job.classes, vectors = (entries + S::width - 1) / S::width;
    const Wanted<S, T> wanted(job, r);
    const bool dense = job.dense();
    const Vectors<S, N> f = this->f;
    const V floor = this->floor;

    double top = minus_infinity<double>(), total = 0, mass = 0, dot = 0, spread = 0;
    V best_of_lane{}, top_of_lane = lowest();
    for (int64_t begin = 0; begin < vectors; begin += segment) {
      const int64_t end = min(begin + segment, vectors);
      C* const work = this->work;
      const int64_t origin = begin * S::width;
      V m = lowest(), masses{};
      for (int64_t part = begin; part < end; part += sum_every) {
        V q_sum{};
        each<S>(
            part, min(part + sum_every, end), entries, MULTIMAX_EACH {
              V x = load<S>(x_ + at, n);
              auto off = masked<S>(x, floor, n);
              V s = S::select(off, lowest(), sigma(f, x));
              if constexpr (Full) {
                if (dense) q_sum = q_sum + S::zero_if(off, wanted.at(at, n));
                auto higher = S::lt(top_of_lane, s);
                top_of_lane = S::select(higher, s, top_of_lane);
                best_of_lane = S::select(higher, S::set(static_cast<C>(i)), best_of_lane);
              }
              m = S::max(s, m);
              S::store(work + (at - origin), s);
            });
        if constexpr (Full) masses = masses + q_sum;
      }
      const C highest = S::max(m);
      const V base = S::set(highest == minus_infinity<C>() ? C{} : highest);
      V sums{}, spreads{}, dots{};
      for (int64_t part = begin; part < end; part += sum_every) {
        V sum{}, spread_sum{}, dot_sum{};
        each<S>(
            part, min(part + sum_every, end), entries, MULTIMAX_EACH {
              V s = S::load(work + (at - origin)) - base;  // lanes that are not there hold -inf
              V e = exp<S>(s);
              sum = sum + e;
              if constexpr (Full) {
                spread_sum = spread_sum + S::zero_if(S::le(e, V{}), e * s);
                if (dense) {
                  // what is not there and not wanted costs nothing; what is wanted all the same, infinitely much
                  V q = wanted.at(at, n);
                  auto zero = S::both(S::le(q, V{}), S::le(V{}, q));
                  dot_sum = dot_sum + S::zero_if(S::both(zero, S::le(s, lowest())), q * s);
                }
              }
            });
        sums = sums + sum;
        if constexpr (Full) {
          spreads = spreads + spread_sum;
          dots = dots + dot_sum;
        }
      }
      // to the higher of the two maxima
      const double own = static_cast<double>(highest), higher = own > top ? own : top;
      const double own_total = static_cast<double>(S::sum(sums)), own_mass = static_cast<double>(S::sum(masses));
      const double own_dot = static_cast<double>(S::sum(dots));
      if (higher == minus_infinity<double>()) {
        total += own_total;  // 0, or NaN
        mass += own_mass;
        dot += own_dot;
        continue;
      }
      const double a = __builtin_exp(top - higher), b = __builtin_exp(own - higher);
      if constexpr (Full) {
        // a factor of 0 is 0, whatever it is multiplied with
        auto times = [](double x, double y) { return x == 0 ? 0.0 : x * y; };
        spread = times(a, spread + times(total, top - higher)) +
                 times(b, static_cast<double>(S::sum(spreads)) + times(own_total, own - higher));
        dot = dot + times(mass, top - higher) + own_dot + times(own_mass, own - higher);
        mass += own_mass;
      }
      total = total * a + own_total * b;
      top = higher;
    }
    stats[LossPlane::top * plane] = top;
    stats[LossPlane::total * plane] = total;
    if (int64_t entry = entry_of(job, r); entry >= 0) {
      V x = load<S>(x_ + entry, 1);
      stats[LossPlane::score * plane] =
          static_cast<double>(S::select(masked<S>(x, floor, 1), lowest(), sigma(f, x))[0]);
    }
    if constexpr (Full) {
      stats[LossPlane::mass * plane] = mass;
      stats[LossPlane::dot * plane] = dot;
      stats[LossPlane::spread * plane] = spread;
      int64_t best = entries;
      for (int lane = 0; lane < S::width; ++lane) {
        if (top == minus_infinity<double>() || static_cast<double>(top_of_lane[lane]) != top) continue;
        best = min(best, static_cast<int64_t>(best_of_lane[lane]) * S::width + lane);
      }
      stats[LossPlane::best * plane] = static_cast<double>(best < entries ? job.first_class + best : -1);
    }
  }
};

template <class S, class T, int N, bool Dense, bool WithParams>
struct Backward {
  using C = typename S::T;
  using V = typename S::V;

  const LossJob& job;
  const Vectors<S, N> f, slopes;
  V floor;
  ParamSums<S>& params;

  void row(int64_t r) const {
    T* const out = static_cast<T*>(job.out) + r * job.out_stride;
    const T* const x_ = static_cast<const T*>(job.x) + r * job.row_stride;
    const int64_t entries = job.classes, vectors = (entries + S::width - 1) / S::width;
    if (ignored(job, r)) {
      each<S>(0, vectors, entries, [&](int64_t, int64_t at, int n) { store<S>(out + at, V{}, n); });
      return;
    }
    const Wanted<S, T> wanted(job, r);
    const Vectors<S, N> f = this->f, slopes = this->slopes;
    const V floor = this->floor;
    const double* const stats = job.stats + r;
    const V top = S::set(static_cast<C>(stats[LossPlane::top * job.rows]));
    const V p_scale = S::set(static_cast<C>(job.p_scale[r] / stats[LossPlane::total * job.rows]));
    const V scale = S::set(static_cast<C>(job.scale[r]));
    const int64_t entry = entry_of(job, r);
    // read before out, which may be x, is written
    const V x_of_target = entry < 0 ? V{} : load<S>(x_ + entry, 1);

    V in_registers[N == 0 ? 1 : 4 * N];
    V* const sums = N == 0 ? params.lanes : in_registers;
    if constexpr (WithParams) {
      for (int j = 0; j < 4 * N; ++j) sums[j] = params.lanes[j];
    }
    auto wanting = [&](V x, int64_t at, int n) __attribute__((always_inline)) {
      V ds = exp<S>(sigma(f, x) - top) * p_scale;
      if constexpr (Dense) ds = ds - scale * wanted.at(at, n);
      return ds;
    };
    for (int64_t begin = 0; begin < vectors; begin += fold_every) {
      const int64_t end = min(begin + fold_every, vectors);
      each<S>(
          begin, end, entries, MULTIMAX_EACH {
            V x = load<S>(x_ + at, n);
            auto off = masked<S>(x, floor, n);
            x = S::zero_if(off, x);  // 0 * inf would be NaN
            V ds = S::zero_if(off, wanting(x, at, n));
            store<S>(out + at, sigma_backward<WithParams>(slopes, x, ds, sums), n);
          });
      if (WithParams && (params.pending += end - begin) >= fold_every) {
        for (int j = 0; j < 4 * N; ++j) params.lanes[j] = sums[j];
        params.fold();
        for (int j = 0; j < 4 * N; ++j) sums[j] = V{};
      }
    }
    if (entry >= 0 && !S::any(S::both(S::first(1), masked<S>(x_of_target, floor, 1)))) {
      C share = static_cast<C>(job.share * job.scale[r]);
      if (job.weight != nullptr) share *= static_cast<const C*>(job.weight)[entry];
      const V wish = S::select(S::first(1), S::set(share), V{});
      V none[N == 0 ? 1 : 4 * N];
      V ds = S::select(S::first(1), wanting(x_of_target, entry, 1) - wish, V{});
      store<S>(out + entry, sigma_backward<false>(slopes, x_of_target, ds, none), 1);
      if constexpr (WithParams) sigma_backward<true>(slopes, x_of_target, -wish, sums);
    }
    if constexpr (WithParams) {
      for (int j = 0; j < 4 * N; ++j) params.lanes[j] = sums[j];
    }
  }
};

// What one thread needs beside the tensors themselves.
template <class S>
struct Scratch {
  typename S::T* work;    // (segment, width)
  typename S::T* slopes;  // (2, order)
  typename S::V* sums;
  double* folded;
  int64_t bytes = 0;

  Scratch(const LossJob& job, void* memory) {
    char* base = static_cast<char*>(memory);
    auto take = [&]<class U>(U*& p, int64_t n) {
      p = reinterpret_cast<U*>(base + bytes);
      bytes += (n * static_cast<int64_t>(sizeof(U)) + 63) / 64 * 64;
    };
    take(work, segment * S::width);
    take(slopes, 2 * job.order);
    take(sums, 4 * job.order);
    take(folded, 4 * job.order * S::width);
  }
};

template <bool backward, class T, int N>
void run_blocks(const LossJob& job, int64_t first, int64_t last, void* memory) {
  using S = Simd<typename Compute<T>::type>;
  using C = typename S::T;
  const Scratch<S> scratch(job, memory);
  const auto floor = S::set(static_cast<C>(job.floor));
  const C* c = static_cast<const C*>(job.params);
  const C *e = c + job.order, *b = e + job.order, *d = b + job.order;
  const Vectors<S, N> f({job.order, c, e, b, d});
  for (int i = 0; i < 2 * job.order; ++i) scratch.slopes[i] = c[i] * static_cast<C>(i % job.order + 1);
  const Vectors<S, N> slopes({job.order, scratch.slopes, scratch.slopes + job.order, b, d});
  ParamSums<S> params{scratch.sums, scratch.folded, 0, job.order};

  for (int64_t block = first; block < last; ++block) {
    const int64_t begin = block * job.block_rows, end = min(begin + job.block_rows, job.rows);
    auto all = [&](const auto& kernel) {
      for (int64_t r = begin; r < end; ++r) kernel.row(r);
    };
    if constexpr (!backward) {
      if (job.full) {
        all(Forward<S, T, N, true>{job, f, floor, scratch.work});
      } else {
        all(Forward<S, T, N, false>{job, f, floor, scratch.work});
      }
    } else {
      auto with_params = [&]<bool WithParams>() {
        if (job.dense()) {
          all(Backward<S, T, N, true, WithParams>{job, f, slopes, floor, params});
        } else {
          all(Backward<S, T, N, false, WithParams>{job, f, slopes, floor, params});
        }
      };
      if (job.sums == nullptr) {
        with_params.template operator()<false>();
      } else {
        params.clear();
        with_params.template operator()<true>();
        params.total(job.sums + block * 4 * job.order);
      }
    }
  }
}

template <bool backward, class T>
void run(const LossJob& job, int64_t first, int64_t last, void* memory) {
  if (job.order == 1) return run_blocks<backward, T, 1>(job, first, last, memory);
  if (job.order == 2) return run_blocks<backward, T, 2>(job, first, last, memory);
  run_blocks<backward, T, 0>(job, first, last, memory);
}

template <bool backward>
void run(const LossJob& job, int64_t first, int64_t last, void* memory) {
  switch (job.dtype) {
    case DType::f32:
      return run<backward, float>(job, first, last, memory);
    case DType::f64:
      return run<backward, double>(job, first, last, memory);
    case DType::bf16:
      return run<backward, bf16>(job, first, last, memory);
    case DType::f16:
      return run<backward, f16>(job, first, last, memory);
  }
}

int64_t scratch_bytes(const LossJob& job) {
  return job.dtype == DType::f64 ? Scratch<Simd<double>>(job, nullptr).bytes : Scratch<Simd<float>>(job, nullptr).bytes;
}

}  // namespace

const LossKernels loss_kernels = {scratch_bytes, run<false>, run<true>};

}  // namespace multimax::MULTIMAX_ISA
