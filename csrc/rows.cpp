// The row kernels. Compiled once for each instruction set, with MULTIMAX_ISA naming it; uses nothing of the C++
// library, since an inline function of it, compiled here for a newer machine, could end up in everybody's code.
#include "rows.h"

#include "memory.h"
#include "multimax_math.h"
#include "sums.h"

namespace multimax::MULTIMAX_ISA {
namespace {

// Long rows go by segments: what one pass writes is still in the first-level cache for the next, and a sum is carried
// in vectors of the compute type over one segment only.
constexpr int64_t segment = 256;  // vectors
// Within a segment a sum runs over this many vectors before it joins the segment's own: sums of sums round less.
constexpr int64_t sum_every = 32;
// Short rows go by batches: each pass runs over all rows of a batch before the next pass begins, so that nobody waits
// for one row's maximum or sum.
constexpr int batch_rows = 4;
constexpr int64_t batch_entries = 1024;

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

// An item's entries of one tensor: a sequence of vectors, `step` elements apart.
template <class S, class T>
struct Stream {
  using V = typename S::V;
  using M = Memory<S, T>;
  T* data;
  int64_t step;

  V load(int64_t i, Whole) const { return M::load(data + i * step); }
  V load(int64_t i, Part part) const { return M::load(data + i * step, part.n); }
  void store(int64_t i, V a, Whole) const { M::store(data + i * step, a); }
  void store(int64_t i, V a, Part part) const { M::store(data + i * step, a, part.n); }
};

// An item: `full` whole vectors, then `partial` ones of `part` lanes each. Row by row there is at most one partial
// vector, at the end; in columns either all are whole or all are partial.
template <class S, class T>
struct Tile {
  Stream<S, T> x, y, grad, out;
  Stream<S, typename S::T> work;  // values on their way
  T* home;                        // where out belongs
  typename S::T* stats;
  int64_t stats_stride, stats_plane;
  int64_t full, partial;
  int part;
  bool columns;

  int64_t vectors() const { return full + partial; }
  int lanes() const { return columns ? (full ? S::width : part) : 1; }  // rows in the item
};

// Passes copy what they need of tile and parameters into locals: what a store might change is read again and again.
// The body is given i, where `chain` sums side by side (and not one that each vector has to wait for) may be kept, and
// whether vector i is whole.
template <int chains = 1, class Tile, class Body>
MULTIMAX_INLINE void each(const Tile& t, int64_t begin, int64_t end, Body body) {
  const int64_t full = t.full;
  const Part part{t.part};
  const int64_t whole_end = min(end, full);
  int64_t i = begin;
  for (; i + chains <= whole_end; i += chains) {
#pragma GCC unroll 8
    for (int chain = 0; chain < chains; ++chain) body(i + chain, chain, Whole{});
  }
  if constexpr (chains > 1) {
    for (; i < whole_end; ++i) body(i, 0, Whole{});
  }
  for (i = max(begin, full); i < end; ++i) body(i, 0, part);
}

#define MULTIMAX_EACH [&](int64_t i, [[maybe_unused]] int chain, auto part) __attribute__((always_inline))

// Which lanes are masked; those that are not there count as such.
template <class S>
MULTIMAX_INLINE auto masked(typename S::V x, typename S::V floor, Whole) {
  return S::le(x, floor);
}
template <class S>
MULTIMAX_INLINE auto masked(typename S::V x, typename S::V floor, Part part) {
  return S::le(S::select(S::first(part.n), x, floor), floor);
}

template <class S>
inline typename S::V log_lanes(typename S::V a) {
  typename S::T lane[S::width];
  S::store(lane, a);
  for (int i = 0; i < S::width; ++i) lane[i] = static_cast<typename S::T>(__builtin_log(lane[i]));
  return S::load(lane);
}

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

// Where an item lies: its place on every axis, and the offsets that follow from it.
struct Position {
  int64_t index[max_axes];
  int64_t lane;

  void seek(const RowJob& job, int64_t item, int width) {
    lane = 0;
    if (job.columns) {
      int64_t lane_items = (job.lanes + width - 1) / width;
      lane = item % lane_items * width;
      item /= lane_items;
    }
    for (int a = job.axes - 1; a >= 0; --a) {
      index[a] = item % job.sizes[a];
      item /= job.sizes[a];
    }
  }
  void next(const RowJob& job, int width) {
    if (job.columns && (lane += width) < job.lanes) return;
    lane = 0;
    for (int a = job.axes - 1; a >= 0; --a) {
      if (++index[a] < job.sizes[a]) return;
      index[a] = 0;
    }
  }
  int64_t offset(const RowJob& job, const int64_t* strides) const {
    int64_t at = 0;
    for (int a = 0; a < job.axes; ++a) at += index[a] * strides[a];
    return at;
  }
  template <class T>
  T* in(const RowJob& job, const Operand& operand) const {
    return static_cast<T*>(operand.data) + offset(job, operand.strides) + lane * operand.lane_stride;
  }
};

inline bool side_by_side(const RowJob& job, const Operand& operand) {
  return (job.columns ? operand.lane_stride : operand.length_stride) == 1 || job.length == 1;
}

// What one thread needs beside the tensors themselves.
template <class S, class T>
struct Scratch {
  using C = typename S::T;
  using V = typename S::V;
  T *x, *y, *grad, *out;  // (batch, entries) copies of what does not lie side by side
  C* work;                // (batch, entries)
  V* segment_tops;
  C* slopes;  // (2, order)
  V* sums;
  double* folded;
  int64_t entries, bytes;
  int batch;

  // long rows: rather than a second array that does not fit the cache
  static bool works_in_place(const RowJob& job) {
    return same<T, C> && (job.columns ? job.length : (job.length + S::width - 1) / S::width) > segment;
  }

  Scratch(const RowJob& job, void* memory) : bytes(0) {
    batch = job.columns ? 1 : static_cast<int>(max(1, min(batch_rows, batch_entries / max(job.length, 1))));
    // a row begins on a cache line, and one line further than its predecessor's end: not at a multiple of 4096 bytes
    entries = job.columns ? job.length * S::width : (job.length + 15) / 16 * 16 + 16;
    char* base = static_cast<char*>(memory);
    auto take = [&]<class U>(U*& p, int64_t n) {
      p = reinterpret_cast<U*>(base + bytes);
      bytes += (n * static_cast<int64_t>(sizeof(U)) + 63) / 64 * 64;
    };
    auto copies = [&](const Operand& operand) {
      return operand.data == nullptr || side_by_side(job, operand) ? 0 : batch * entries;
    };
    take(x, job.mask.data == nullptr ? copies(job.x) : batch * entries);
    take(y, copies(job.y));
    take(grad, copies(job.grad));
    take(out, copies(job.out));
    take(work, works_in_place(job) ? 0 : batch * entries);
    take(segment_tops, entries / S::width / segment + 1);
    take(slopes, 2 * job.order);
    take(sums, 4 * job.order);
    take(folded, 4 * job.order * S::width);
  }
};

template <class T>
inline void copy(T* to, int64_t to_stride, const T* from, int64_t from_stride, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i * to_stride] = from[i * from_stride];
}

// A copy of one operand's entries of an item, side by side, with masked ones as -inf.
template <class S, class T>
__attribute__((noinline)) void gather(const RowJob& job, const Position& at, const Operand& operand,
                                      const Operand* mask, T* buffer, int lanes) {
  const T* from = at.in<const T>(job, operand);
  if (mask != nullptr && !job.columns && operand.length_stride == 1 && mask->length_stride == 1) {
    const unsigned char* takes_part = at.in<const unsigned char>(job, *mask);  // the usual case, in vectors
    for (int64_t i = 0; i < job.length; ++i) buffer[i] = takes_part[i] ? from[i] : minus_infinity<T>();
    return;
  }
  int64_t step = job.columns ? S::width : 1;
  if (job.columns) {
    for (int64_t i = 0; i < job.length; ++i) {
      copy(buffer + i * step, 1, from + i * operand.length_stride, operand.lane_stride, lanes);
    }
  } else {
    copy(buffer, 1, from, operand.length_stride, job.length);
  }
  if (mask == nullptr) return;
  const unsigned char* takes_part = at.in<const unsigned char>(job, *mask);
  for (int64_t i = 0; i < job.length; ++i) {
    for (int lane = 0; lane < lanes; ++lane) {
      T& entry = buffer[i * step + lane];
      entry = takes_part[i * mask->length_stride + lane * mask->lane_stride] ? entry : minus_infinity<T>();
    }
  }
}

// An item's tile: entries in place where they lie side by side, else copies.
template <class S, class T>
MULTIMAX_INLINE void lay_out(const RowJob& job, const Position& at, const Scratch<S, T>& scratch, int which,
                             Tile<S, T>& t) {
  int lanes = 1;
  t.columns = job.columns;
  if (job.columns) {
    lanes = static_cast<int>(min(S::width, job.lanes - at.lane));
    t.full = lanes == S::width ? job.length : 0;
    t.partial = job.length - t.full;
    t.part = lanes;
  } else {
    t.full = job.length / S::width;
    t.part = static_cast<int>(job.length % S::width);
    t.partial = t.part != 0;
  }
  int64_t buffer = which * scratch.entries;
  auto bring = [&](const Operand& operand, const Operand* mask, T* copy_to, Stream<S, T>& stream) {
    if (operand.data == nullptr) return;
    if (side_by_side(job, operand) && mask == nullptr) {
      stream.data = at.in<T>(job, operand);
      stream.step = job.columns ? operand.length_stride : S::width;
    } else {
      gather<S>(job, at, operand, mask, copy_to, lanes);
      stream.data = copy_to;
      stream.step = S::width;
    }
  };
  bring(job.x, job.mask.data ? &job.mask : nullptr, scratch.x + buffer, t.x);
  bring(job.y, nullptr, scratch.y + buffer, t.y);
  bring(job.grad, nullptr, scratch.grad + buffer, t.grad);
  t.stats = job.stats.data ? at.in<typename S::T>(job, job.stats) : nullptr;
  t.stats_stride = job.stats.lane_stride;
  t.stats_plane = job.stats_plane;
  t.home = at.in<T>(job, job.out);
  bool in_place = side_by_side(job, job.out);
  t.out.data = in_place ? t.home : scratch.out + buffer;
  t.out.step = in_place && job.columns ? job.out.length_stride : S::width;
  t.work.data = scratch.work + buffer;
  t.work.step = S::width;
  if constexpr (same<T, typename S::T>) {
    if (scratch.works_in_place(job)) t.work = t.out;
  }
}

// Results that were not written in place.
template <class S, class T>
void deliver(const RowJob& job, const Tile<S, T>& t) {
  if (t.out.data == t.home) return;
  if (!job.columns) return copy(t.home, job.out.length_stride, t.out.data, 1, job.length);
  for (int64_t i = 0; i < job.length; ++i) {
    copy(t.home + i * job.out.length_stride, job.out.lane_stride, t.out.data + i * S::width, 1,
         t.full ? S::width : t.part);
  }
}

template <bool backward, class T, class S, int N, Kind kind>
void run_blocks(const RowJob& job, int64_t first, int64_t last, void* memory) {
  using C = typename S::T;
  const Scratch<S, T> scratch(job, memory);
  const auto floor = S::set(static_cast<C>(job.floor));

  for (int64_t block = first; block < last; ++block) {
    int64_t item = block / job.run_blocks * job.run_items + block % job.run_blocks * job.block_items;
    int64_t end = min(item + job.block_items, (block / job.run_blocks + 1) * job.run_items);
    Position at;
    at.seek(job, item, S::width);
    const C* set = static_cast<const C*>(job.params) + at.offset(job, job.set_strides) * 4 * job.order;
    const C *b = set + 2 * job.order, *d = set + 3 * job.order;
    const Vectors<S, N> f({job.order, set, set + job.order, b, d});
    for (int i = 0; i < 2 * job.order; ++i) scratch.slopes[i] = set[i] * static_cast<C>(i % job.order + 1);
    const Vectors<S, N> slopes({job.order, scratch.slopes, scratch.slopes + job.order, b, d});
    ParamSums<S> params{scratch.sums, scratch.folded, 0, job.order};
    if (backward) params.clear();

    while (item < end) {
      Tile<S, T> tiles[batch_rows];
      int rows = static_cast<int>(min(scratch.batch, end - item));
      item += rows;
      for (int r = 0; r < rows; ++r, at.next(job, S::width)) lay_out(job, at, scratch, r, tiles[r]);
      if constexpr (!backward) {
        Forward<S, T, N, kind>{f, floor}.run(tiles, rows, scratch.segment_tops);
      } else if (job.sums != nullptr) {
        Backward<S, T, N, kind, true>{f, slopes, floor, params}.run(tiles, rows);
      } else {
        Backward<S, T, N, kind, false>{f, slopes, floor, params}.run(tiles, rows);
      }
      for (int r = 0; r < rows; ++r) deliver(job, tiles[r]);
    }
    if (backward && job.sums != nullptr) params.total(job.sums + block * 4 * job.order);
  }
}

template <bool backward, class T>
void run(const RowJob& job, int64_t first, int64_t last, void* memory) {
  using S = Simd<typename Compute<T>::type>;
  auto with_order = [&]<Kind kind>() {
    if (job.order == 1) return run_blocks<backward, T, S, 1, kind>(job, first, last, memory);
    if (job.order == 2) return run_blocks<backward, T, S, 2, kind>(job, first, last, memory);
    run_blocks<backward, T, S, 0, kind>(job, first, last, memory);
  };
  if (job.kind == Kind::multimax) return with_order.template operator()<Kind::multimax>();
  if (job.kind == Kind::log_multimax) return with_order.template operator()<Kind::log_multimax>();
  with_order.template operator()<Kind::modulate>();
}

template <bool backward>
void run(const RowJob& job, int64_t first, int64_t last, void* memory) {
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

int64_t scratch_bytes(const RowJob& job) {
  if (job.dtype == DType::f64) return Scratch<Simd<double>, double>(job, nullptr).bytes;
  if (job.dtype == DType::f32) return Scratch<Simd<float>, float>(job, nullptr).bytes;
  return Scratch<Simd<float>, bf16>(job, nullptr).bytes;
}

}  // namespace

const RowKernels row_kernels = {Simd<float>::width, Simd<double>::width, scratch_bytes, run<false>, run<true>};

}  // namespace multimax::MULTIMAX_ISA
