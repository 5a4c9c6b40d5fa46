// A row as the kernels of this room see it: entries side by side, in vectors, and sums over them.
#pragma once

#include "entmax/entmax.h"
#include "simd/sigma.h"
#include "simd/types.h"

namespace multimax::MULTIMAX_ISA {
namespace {

// Within this many vectors a sum is carried in the compute type, beyond in double.
constexpr int64_t sum_every = 32;

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
MULTIMAX_INLINE Mask truth(const unsigned char* p, Whole) { return S::truth(p); }
MULTIMAX_INLINE Mask truth(const unsigned char* p, Part part) { return S::truth(p, part.n); }

// Sums over all vectors of [0, n): the body adds to those it is given.
template <int count, class Body>
MULTIMAX_INLINE void sums(int64_t n, double (&totals)[count], Body body) {
  for (int j = 0; j < count; ++j) totals[j] = 0;
  for (int64_t begin = 0; begin < n; begin += sum_every * S::width) {
    V sum[count] = {};
    each(begin, min(begin + sum_every * S::width, n), MULTIMAX_EACH { body(i, part, sum); });
    for (int j = 0; j < count; ++j) totals[j] += S::wide_sum(sum[j]);
  }
}

template <class Entry>
MULTIMAX_INLINE V load(const Entry* p, Whole) {
  return Memory<S, Entry>::load(p);
}
template <class Entry>
MULTIMAX_INLINE V load(const Entry* p, Part part) {
  return Memory<S, Entry>::load(p, part.n);
}
template <class Entry>
MULTIMAX_INLINE void store(Entry* p, V a, Whole) {
  Memory<S, Entry>::store(p, a);
}
template <class Entry>
MULTIMAX_INLINE void store(Entry* p, V a, Part part) {
  Memory<S, Entry>::store(p, a, part.n);
}

// Numbers that lie one after the other; what is not there is far below.
MULTIMAX_INLINE V load_or_lowest(const C* p, Whole) { return S::load(p); }
MULTIMAX_INLINE V load_or_lowest(const C* p, Part part) {
  return S::select(S::first(part.n), S::load(p, part.n), S::set(minus_infinity<C>()));
}

inline C infinity() { return -minus_infinity<C>(); }
inline C nan() { return static_cast<C>(__builtin_nan("")); }

// What one thread needs beside the tensors.
struct Scratch {
  C* numbers;  // (length), and a vector further: a whole one is written where candidates end
  T* entries;  // (length), for a row of which some entries are taken out
};

// The next row's entry, to be on its way while this row is at work: without it, either waits for the other.
template <class Entry>
MULTIMAX_INLINE void fetch_next(const Entry* row, int64_t length, int64_t i) {
  __builtin_prefetch(row + length + i);
}

struct Row {
  const T* x;
  int64_t length;

  static V floor() { return S::set(masked_floor<T>); }

  // The largest entry, -inf if there is none; NaN if there is a NaN, or nothing finite to measure from. And the
  // largest of each lane.
  C largest(V& tops) const {
    const V lowest = S::set(minus_infinity<C>());
    V top = lowest;
    Mask bad = S::first(0);
    each(
        0, length, MULTIMAX_EACH {
          V a = load(x + i, part);
          if constexpr (same<decltype(part), Part>) a = S::select(there(part), a, lowest);
          bad = S::either(bad, S::nan(a));
          top = S::max(a, top);
        });
    tops = top;
    C result = S::max(top);
    return S::any(bad) || result == infinity() ? nan() : result;
  }

  // The same number everywhere but where entries are masked; there 0.
  void fill(T* out, C value) const {
    const V a = S::set(value);
    each(0, length, MULTIMAX_EACH { store(out + i, S::zero_if(S::le(load(x + i, part), floor()), a), part); });
  }
};

}  // namespace
}  // namespace multimax::MULTIMAX_ISA
