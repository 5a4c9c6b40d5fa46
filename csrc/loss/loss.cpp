// The kernels of the loss's row part. Compiled once for each instruction set and dtype, with MULTIMAX_ISA and
// MULTIMAX_DTYPE naming them.
#include "loss/loss.h"

#include "simd/scratch.h"
#include "simd/sigma.h"
#include "simd/sums.h"
#include "simd/types.h"

namespace multimax::MULTIMAX_ISA {
namespace {

// A row goes by segments that stay in the first-level cache from one loop to the next, and whose sums are carried in
// vectors: sums of `sum_every` vectors, sums of these, and beyond the segment double.
constexpr int64_t segment = 256;  // vectors
constexpr int64_t sum_every = 32;

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

// Calls body(i, first entry, how many entries) for the vectors of a row, the last of which may be cut short.
template <class Body>
MULTIMAX_INLINE void each(int64_t begin, int64_t end, int64_t entries, Body body) {
  const int64_t whole = min(end, entries / S::width);
  for (int64_t i = begin; i < whole; ++i) body(i, i * S::width, S::width);
  if (whole < end) body(whole, whole * S::width, static_cast<int>(entries - whole * S::width));
}

#define MULTIMAX_EACH [&]([[maybe_unused]] int64_t i, int64_t at, [[maybe_unused]] int n) __attribute__((always_inline))

template <class Entry>
MULTIMAX_INLINE V load(const Entry* from, int n) {
  return n == S::width ? Memory<S, Entry>::load(from) : Memory<S, Entry>::load(from, n);
}

MULTIMAX_INLINE void store(T* to, V a, int n) {
  n == S::width ? Memory<S, T>::store(to, a) : Memory<S, T>::store(to, a, n);
}

// Which lanes are masked; those that are not there count as such.
MULTIMAX_INLINE Mask masked(V x, V floor, int n) {
  return S::le(n == S::width ? x : S::select(S::first(n), x, floor), floor);
}

// q of one row, but for an index.
struct Wanted {
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
    if (wide != nullptr) q = q + share * load(wide + i, n);
    if (narrow != nullptr) q = q + share * load(narrow + i, n);
    if (weight != nullptr) q = q * load(weight + i, n);
    return n == S::width ? q : S::select(S::first(n), q, V{});
  }
};

// The entry of a row that its index points to; -1 if it lies in another part of the row, or nowhere: no index, however
// wrong, reaches memory that is not the row's.
inline int64_t entry_of(const LossJob& job, int64_t row) {
  if (job.target == nullptr) return -1;
  const int64_t target = job.target[row];
  return target >= job.first_class && target < job.first_class + job.classes ? target - job.first_class : -1;
}

inline Params<C> params_of(const LossJob& job) {
  const C* c = static_cast<const C*>(job.params);
  return {job.order, c, c + job.order, c + 2 * job.order, c + 3 * job.order};
}

inline V lowest() { return S::set(minus_infinity<C>()); }

// What the forward carries from one segment of a row to the next.
struct Lanes {
  V top = lowest(), best{};
};

// A segment's sigma to work; their largest, and the sum of what is wanted of entries that are not masked. Lanes that
// are not there hold -inf.
template <int N, bool Full>
void modulate(const LossJob& job, const T* x_, const Wanted& of_row, int64_t begin, int64_t end, C* work, Lanes& lanes,
              V& largest, V& mass) {
  const Vectors<S, N> f(params_of(job));
  const V floor = S::set(masked_floor<T>);
  const int64_t entries = job.classes, origin = begin * S::width;
  const Wanted wanted = of_row;
  const bool dense = job.dense();
  V best_of_lane = lanes.best, top_of_lane = lanes.top;
  V m = lowest(), masses{};
  for (int64_t part = begin; part < end; part += sum_every) {
    V q_sum{};
    each(
        part, min(part + sum_every, end), entries, MULTIMAX_EACH {
          V x = load(x_ + at, n);
          auto off = masked(x, floor, n);
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
  largest = m;
  if constexpr (Full) {
    lanes = {top_of_lane, best_of_lane};
    mass = masses;
  }
}

// A segment's sums of exp(s - base), and of what is multiplied with s - base.
template <bool Full>
void exponentiate(const LossJob& job, const Wanted& of_row, int64_t begin, int64_t end, const C* work, V base, V& total,
                  V& spread, V& dot) {
  const int64_t entries = job.classes, origin = begin * S::width;
  const Wanted wanted = of_row;
  const bool dense = job.dense();
  V sums{}, spreads{}, dots{};
  for (int64_t part = begin; part < end; part += sum_every) {
    V sum{}, spread_sum{}, dot_sum{};
    each(
        part, min(part + sum_every, end), entries, MULTIMAX_EACH {
          V s = S::load(work + (at - origin)) - base;
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
  total = sums;
  if constexpr (Full) {
    spread = spreads;
    dot = dots;
  }
}

template <int N>
double score_of(const LossJob& job, const T* at) {
  const V x = load(at, 1);
  const V s = S::select(masked(x, S::set(masked_floor<T>), 1), lowest(), sigma(Vectors<S, N>(params_of(job)), x));
  return static_cast<double>(s[0]);
}

template <bool Full>
struct Forward {
  const LossJob& job;
  C* work;  // (segment, width)
  decltype(&modulate<0, Full>) modulate;
  decltype(&score_of<0>) score_of;

  // Of the vectors [first, last) of a row.
  LossSums part(int64_t r, int64_t first, int64_t last) const {
    const T* const x_ = static_cast<const T*>(job.x) + r * job.row_stride;
    const Wanted wanted(job, r);
    LossSums whole;
    Lanes lanes;
    for (int64_t begin = first; begin < last; begin += segment) {
      const int64_t end = min(begin + segment, last);
      V largest, masses{}, sums, spreads{}, dots{};
      modulate(job, x_, wanted, begin, end, work, lanes, largest, masses);
      const C highest = S::max(largest);
      const V base = S::set(highest == minus_infinity<C>() ? C{} : highest);
      exponentiate<Full>(job, wanted, begin, end, work, base, sums, spreads, dots);
      LossSums here;
      here.top = static_cast<double>(highest);
      here.total = static_cast<double>(S::sum(sums));
      if constexpr (Full) {
        here.mass = static_cast<double>(S::sum(masses));
        here.dot = static_cast<double>(S::sum(dots));
        here.spread = static_cast<double>(S::sum(spreads));
      }
      whole.add(here);
    }
    if (int64_t entry = entry_of(job, r); entry >= first * S::width && entry < last * S::width) {
      whole.score = score_of(job, x_ + entry);
    }
    if constexpr (Full) {
      int64_t best = job.classes;
      const V top_of_lane = lanes.top, best_of_lane = lanes.best;
      for (int lane = 0; lane < S::width; ++lane) {
        if (whole.top == minus_infinity<double>() || static_cast<double>(top_of_lane[lane]) != whole.top) continue;
        best = min(best, static_cast<int64_t>(best_of_lane[lane]) * S::width + lane);
      }
      whole.best = static_cast<double>(best < job.classes ? job.first_class + best : -1);
    } else {
      whole.best = 0;
    }
    return whole;
  }
};

template <int N, bool Dense, bool WithParams>
void backward_row(const LossJob& job, const C* slope_coefs, ParamSums<S>& param_sums, int64_t r, int64_t first,
                  int64_t last) {
  T* const out = static_cast<T*>(job.out) + r * job.out_stride;
  const T* const x_ = static_cast<const T*>(job.x) + r * job.row_stride;
  const int64_t entries = job.classes;
  if (job.ignored(r)) {
    each(first, last, entries, [&](int64_t, int64_t at, int n) { store(out + at, V{}, n); });
    return;
  }
  const Wanted wanted(job, r);
  const Params<C> params = params_of(job);
  const Vectors<S, N> f(params), slopes({job.order, slope_coefs, slope_coefs + job.order, params.b, params.d});
  const V floor = S::set(masked_floor<T>);
  const double* const stats = job.stats + r;
  const V top = S::set(static_cast<C>(stats[LossPlane::top * job.rows]));
  const V p_scale = S::set(static_cast<C>(job.p_scale[r] / stats[LossPlane::total * job.rows]));
  const V scale = S::set(static_cast<C>(job.scale[r]));
  const int64_t index = entry_of(job, r);
  const int64_t entry = index >= first * S::width && index < last * S::width ? index : -1;
  // read before out, which may be x, is written
  const V x_of_target = entry < 0 ? V{} : load(x_ + entry, 1);

  V in_registers[N == 0 ? 1 : 4 * N];
  V* const sums = N == 0 ? param_sums.lanes : in_registers;
  if constexpr (WithParams) {
    for (int j = 0; j < 4 * N; ++j) sums[j] = param_sums.lanes[j];
  }
  auto wanting = [&](V x, int64_t at, int n) __attribute__((always_inline)) {
    V ds = exp<S>(sigma(f, x) - top) * p_scale;
    if constexpr (Dense) ds = ds - scale * wanted.at(at, n);
    return ds;
  };
  for (int64_t begin = first; begin < last; begin += fold_every) {
    const int64_t end = min(begin + fold_every, last);
    each(
        begin, end, entries, MULTIMAX_EACH {
          V x = load(x_ + at, n);
          auto off = masked(x, floor, n);
          x = S::zero_if(off, x);  // 0 * inf would be NaN
          V ds = S::zero_if(off, wanting(x, at, n));
          store(out + at, sigma_backward<WithParams>(slopes, x, ds, sums), n);
        });
    if (WithParams && (param_sums.pending += end - begin) >= fold_every) {
      for (int j = 0; j < 4 * N; ++j) param_sums.lanes[j] = sums[j];
      param_sums.fold();
      for (int j = 0; j < 4 * N; ++j) sums[j] = V{};
    }
  }
  if (entry >= 0 && !S::any(S::both(S::first(1), masked(x_of_target, floor, 1)))) {
    C share = static_cast<C>(job.share * job.scale[r]);
    if (job.weight != nullptr) share *= static_cast<const C*>(job.weight)[entry];
    const V wish = S::select(S::first(1), S::set(share), V{});
    V none[N == 0 ? 1 : 4 * N];
    V ds = S::select(S::first(1), wanting(x_of_target, entry, 1) - wish, V{});
    store(out + entry, sigma_backward<false>(slopes, x_of_target, ds, none), 1);
    if constexpr (WithParams) sigma_backward<true>(slopes, x_of_target, -wish, sums);
  }
  if constexpr (WithParams) {
    for (int j = 0; j < 4 * N; ++j) param_sums.lanes[j] = sums[j];
  }
}

// What one thread needs beside the tensors themselves.
struct Scratch {
  C* work;    // (segment, width)
  C* slopes;  // (2, order)
  V* sums;
  double* folded;
  int64_t bytes;

  Scratch(const LossJob& job, void* memory) {
    Pieces pieces(memory);
    work = pieces.take<C>(segment * S::width);
    slopes = pieces.take<C>(2 * job.order);
    sums = pieces.take<V>(4 * job.order);
    folded = pieces.take<double>(4 * job.order * S::width);
    bytes = pieces.bytes;
  }
};

// The rows and vectors of an item.
struct Item {
  int64_t row, last_row, part, first, last;

  Item(const LossJob& job, int64_t item) {
    constexpr int64_t of_part = LossJob::part_entries / S::width;
    static_assert(of_part % segment == 0);
    const int64_t parts = job.parts(), vectors = (job.classes + S::width - 1) / S::width;
    row = item / parts * job.item_rows();
    last_row = min(row + job.item_rows(), job.rows);
    part = item % parts;
    first = part * of_part;
    last = parts == 1 ? vectors : min(first + of_part, vectors);
  }
};

template <bool Full>
void forward(const LossJob& job, int64_t first, int64_t last, const Scratch& scratch) {
  const Forward<Full> forward{job, scratch.work, with_order(job.order, []<int N>() { return modulate<N, Full>; }),
                              with_order(job.order, []<int N>() { return score_of<N>; })};
  const int64_t parts = job.parts();
  for (int64_t i = first; i < last; ++i) {
    const Item item(job, i);
    for (int64_t r = item.row; r < item.last_row; ++r) {
      const LossSums sums = job.ignored(r) ? LossSums::of_ignored() : forward.part(r, item.first, item.last);
      parts == 1 ? sums.write(job.stats + r, job.rows) : void(job.of_parts[r * parts + item.part] = sums);
    }
  }
}

void forward(const LossJob& job, int64_t first, int64_t last, void* memory) {
  const Scratch scratch(job, memory);
  job.full ? forward<true>(job, first, last, scratch) : forward<false>(job, first, last, scratch);
}

void backward(const LossJob& job, int64_t first, int64_t last, void* memory) {
  const Scratch scratch(job, memory);
  const C* coefs = static_cast<const C*>(job.params);
  for (int i = 0; i < 2 * job.order; ++i) scratch.slopes[i] = coefs[i] * static_cast<C>(i % job.order + 1);
  const auto backward_row_of = with_order(job.order, [&]<int N>() {
    if (job.sums == nullptr) return job.dense() ? backward_row<N, true, false> : backward_row<N, false, false>;
    return job.dense() ? backward_row<N, true, true> : backward_row<N, false, true>;
  });
  ParamSums<S> param_sums{scratch.sums, scratch.folded, 0, job.order};

  for (int64_t i = first; i < last; ++i) {
    const Item item(job, i);
    if (job.sums != nullptr) param_sums.clear();
    for (int64_t r = item.row; r < item.last_row; ++r) {
      backward_row_of(job, scratch.slopes, param_sums, r, item.first, item.last);
    }
    if (job.sums != nullptr) param_sums.total(job.sums + i * 4 * job.order);
  }
}

void add(void* sum, const void* part, int64_t entries) {
  C* const to = static_cast<C*>(sum);
  const T* const from = static_cast<const T*>(part);
  each(
      0, (entries + S::width - 1) / S::width, entries,
      MULTIMAX_EACH { Memory<S, C>::store(to + at, load(to + at, n) + load(from + at, n), n); });
}

int64_t scratch_bytes(const LossJob& job) { return Scratch(job, nullptr).bytes; }

}  // namespace

const LossKernels MULTIMAX_OF_DTYPE(loss_kernels) = {scratch_bytes, forward, backward, add};

}  // namespace multimax::MULTIMAX_ISA
