// An item of rows: its entries as vectors, and a pass over them.
#pragma once

#include "rows/rows.h"
#include "simd/sigma.h"
#include "simd/sums.h"
#include "simd/types.h"

namespace multimax::MULTIMAX_ISA {
namespace {

// Long rows go by segments: what one pass writes is still in the first-level cache for the next, and a sum is carried
// in vectors of the compute type over one segment only.
constexpr int64_t segment = 256;  // vectors
constexpr int64_t stretch_segments = 2;
// Within a segment a sum runs over this many vectors before it joins the segment's own: sums of sums round less.
constexpr int64_t sum_every = 32;
// Short rows go by batches: each pass runs over all rows of a batch before the next pass begins, so that nobody waits
// for one row's maximum or sum.
constexpr int batch_rows = 4;
constexpr int64_t batch_entries = 1024;

constexpr int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

// An item's entries of one tensor: a sequence of vectors, `step` elements apart.
template <class Entry>
struct Stream {
  using M = Memory<S, Entry>;
  Entry* data;
  int64_t step;

  V load(int64_t i, Whole) const { return M::load(data + i * step); }
  V load(int64_t i, Part part) const { return M::load(data + i * step, part.n); }
  void store(int64_t i, V a, Whole) const { M::store(data + i * step, a); }
  void store(int64_t i, V a, Part part) const { M::store(data + i * step, a, part.n); }
};

// An item: `full` whole vectors, then `partial` ones of `part` lanes each. Row by row there is at most one partial
// vector, at the end; in columns either all are whole or all are partial.
struct Tile {
  Stream<T> x{}, y{}, grad{}, out{};
  Stream<C> work;  // values on their way
  T* home;         // where out belongs
  C* stats;
  int64_t stats_stride, stats_plane;
  int64_t full, partial;
  int part;
  bool columns;
  bool keeps_work;  // of the whole item; else of one segment after the other

  int64_t vectors() const { return full + partial; }
  int64_t length() const { return columns ? vectors() : full * S::width + part; }
  int lanes() const { return columns ? (full ? S::width : part) : 1; }  // rows in the item
};

// Vectors [begin, end) of an item.
inline Tile slice(const Tile& t, int64_t begin, int64_t end) {
  Tile s = t;
  auto move = [&](Stream<T>& stream) {
    if (stream.data != nullptr) stream.data += begin * stream.step;
  };
  move(s.x), move(s.y), move(s.grad), move(s.out);
  if (t.keeps_work) s.work.data += begin * s.work.step;
  s.full = max(min(end, t.full) - begin, 0);
  s.partial = end - begin - s.full;
  if (!s.columns && s.partial == 0) s.part = 0;
  return s;
}

// Passes copy what they need of tile and parameters into locals: what a store might change is read again and again.
// The body is given i, where `chain` sums side by side (and not one that each vector has to wait for) may be kept, and
// whether vector i is whole.
template <int chains = 1, class Body>
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
MULTIMAX_INLINE Mask masked(V x, V floor, Whole) { return S::le(x, floor); }
MULTIMAX_INLINE Mask masked(V x, V floor, Part part) { return S::le(S::select(S::first(part.n), x, floor), floor); }

inline V lowest() { return S::set(minus_infinity<C>()); }

inline V log_lanes(V a) {
  C lane[S::width];
  S::store(lane, a);
  for (int i = 0; i < S::width; ++i) lane[i] = static_cast<C>(__builtin_log(lane[i]));
  return S::load(lane);
}

}  // namespace
}  // namespace multimax::MULTIMAX_ISA
