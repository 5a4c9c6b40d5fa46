// The edge of the k largest numbers, without sorting them.
#pragma once

#include "entmax/row.h"

namespace multimax::MULTIMAX_ISA {
namespace {

// Integers in the order of the numbers, of which there are 2^32 or 2^64: an interval of them can be halved so often at
// most.
template <class C>
struct Keys;
template <>
struct Keys<float> {
  using Key = int32_t;
};
template <>
struct Keys<double> {
  using Key = int64_t;
};
using Key = Keys<C>::Key;

inline Key flip(Key bits) {
  constexpr int sign = 8 * sizeof(Key) - 1;
  return bits ^ static_cast<Key>((bits >> sign) & ~(Key{1} << sign));
}
inline Key key_of(C a) { return flip(bit_cast<Key>(a)); }
inline C number_of(Key key) { return bit_cast<C>(flip(key)); }
// The next numbers, 0 and -0 being the same.
inline C after(C a) { return number_of((a == 0 ? 0 : key_of(a)) + 1); }
inline C before(C a) { return number_of((a == 0 ? -1 : key_of(a)) - 1); }

struct Edge {
  C least;       // the smallest of them, or a number between it and the next
  int64_t ties;  // how many of those equal to it are among the k largest; -1 for all
};

// The edge of the k largest of n >= k >= 1 numbers, above `low` and at most `high`; what is in memory is lost.
//
// A number with exactly k above it is all that is needed. It is looked for where it would be if the numbers were evenly
// spread between two bounds of which more than k and fewer than k lie above; every third step takes the mean of the
// bounds as integers, which no numbers can make slow. Those outside of the bounds are dropped once they are the most.
inline Edge edge_of_largest(C* numbers, int64_t n, int64_t k, C low, C high) {
  int64_t above_low = n, above_high = 0;
  if (k == n) return {after(low), -1};
  for (int step = 1;; ++step) {
    const Key below = key_of(low), upper = key_of(high);
    if (below >= upper - 1) return {high, k - above_high};          // nothing in between: all others are equal
    C pivot = number_of((below & upper) + ((below ^ upper) >> 1));  // their mean
    if (step % 3 != 0) {
      double share = static_cast<double>(k - above_high) / static_cast<double>(above_low - above_high);
      double guess = static_cast<double>(high) - (static_cast<double>(high) - static_cast<double>(low)) * share;
      if (guess > static_cast<double>(low) && guess < static_cast<double>(high)) {
        const C rounded = static_cast<C>(guess);
        if (rounded > low && rounded < high) pivot = rounded;
      }
    }
    const V p = S::set(pivot);
    int64_t above = 0;
    each(0, n, MULTIMAX_EACH { above += S::count(S::lt(p, load_or_lowest(numbers + i, part))); });
    if (above == k) return {after(pivot), -1};
    if (above > k) {
      low = pivot;
      above_low = above;
    } else {
      high = pivot;
      above_high = above;
    }
    if (4 * (above_low - above_high) > n) continue;
    const V l = S::set(low), h = S::set(high);
    int64_t kept = 0;
    each(
        0, n, MULTIMAX_EACH {
          V a = load_or_lowest(numbers + i, part);
          Mask on = S::both(S::lt(l, a), S::le(a, h));
          if (S::any(on)) kept += S::compress(numbers + kept, on, a);
        });
    n = above_low = kept;
    k -= above_high;
    above_high = 0;
  }
}

}  // namespace
}  // namespace multimax::MULTIMAX_ISA
