// Dot products of a few packed queries with keys in place, and how entries of a row in place are read.
#pragma once

#include "attention/operands.h"

namespace multimax::MULTIMAX_ISA {
namespace {

// Bytes of keys or values to fetch ahead. The machine's own prefetching ends with each page of 4096; this goes on.
constexpr int64_t fetch_bytes = 8192;
// Keys or values that all rows take before the next: they stay in the first-level cache. A multiple of 16.
constexpr int64_t cached_keys = TileProduct::most * terms;

template <class T>
struct InPlace {
  using M = Memory<S, T>;
  static constexpr int64_t step = S::width * terms;  // terms of a vector of entries

  static V load(const T* p, Whole) {
    if constexpr (terms == 1) {
      return M::load(p);
    } else {
      V a;
      __builtin_memcpy(&a, p, sizeof a);
      return a;
    }
  }
  static V load(const T* p, Part part) {
#if defined(__AVX512BF16__)
    return load_pairs(p, part.n);
#else
    return M::load(p, part.n);
#endif
  }

  // How many rows ahead of the one at hand to fetch.
  static int64_t rows_ahead(int64_t width) {
    return ceil_div(fetch_bytes, max(width, 1) * static_cast<int64_t>(sizeof(T)));
  }
};

#if defined(__AVX512F__)
// The sums over the lanes of 16 vectors.
inline V sums_of_lanes(const V* a) {
  V quarters[4];  // of four vectors each: sums over the lanes of each quarter
  for (int i = 0; i < 4; ++i, a += 4) {
    V even = _mm512_unpacklo_ps(a[0], a[1]) + _mm512_unpackhi_ps(a[0], a[1]);
    V odd = _mm512_unpacklo_ps(a[2], a[3]) + _mm512_unpackhi_ps(a[2], a[3]);
    __m512d x = _mm512_castps_pd(even), y = _mm512_castps_pd(odd);
    quarters[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y)) + _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
  }
  auto halves = [](V x, V y) { return _mm512_shuffle_f32x4(x, y, 0x88) + _mm512_shuffle_f32x4(x, y, 0xdd); };
  return halves(halves(quarters[0], quarters[1]), halves(quarters[2], quarters[3]));
}
#endif

// Calls f with the first of every four rows, two or one that are left.
template <class F>
void each_rows(int64_t rows, F f) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) f.template operator()<4>(r);
  if (rows & 2) f.template operator()<2>(r), r += 2;
  if (rows & 1) f.template operator()<1>(r);
}

// x = scale q k for few queries, whose rows are packed, and keys [from, to) in place; 0 up to padded(to). What each sum
// is does not depend on the other rows and keys: the backward finds the same x again.
template <class T>
struct Dots {
  using In = InPlace<T>;

  const float* query;
  const T* key;
  int64_t key_row, width, ahead;
  float scale;
  float* x;
  int64_t x_row;

  // Vectors yet to be summed over their lanes.
  template <bool fetch, int rows, int columns>
  MULTIMAX_INLINE void lanes(const float* query, const T* key, V (&sum)[rows][columns]) const {
    const int64_t query_row = row_entries(width), key_row = this->key_row, ahead = this->ahead;
    auto add = [&](int64_t i, auto part) __attribute__((always_inline)) {
      V of_query[rows];
      for (int r = 0; r < rows; ++r) of_query[r] = S::load(query + r * query_row + i / terms);
      for (int k = 0; k < columns; ++k) {
        const T* at = key + k * key_row + i;
        if constexpr (fetch) __builtin_prefetch(at + ahead);
        const V of_key = In::load(at, part);
        for (int r = 0; r < rows; ++r) sum[r][k] = Terms::add(sum[r][k], of_key, of_query[r]);
      }
    };
    int64_t i = 0;
    for (; i + In::step <= width; i += In::step) add(i, Whole{});
    if (i < width) add(i, Part{static_cast<int>(width - i)});
  }

#if defined(__AVX512F__)
  template <bool fetch, int rows>
  void run(int64_t row, int64_t from, int64_t to) const {
    constexpr int columns = 16 / rows;  // 16 sums at a time, of as many keys at once as there are rows
    const float* query = this->query + row * row_entries(width);
    for (int64_t k = from; k < padded(to); k += columns) {
      V sum[rows][columns];
      for (int j = 0; j < columns; j += rows) {
        V some[rows][rows] = {};
        const T* at = key + (k + j) * key_row;
        if (k + j + rows <= to) {
          lanes<fetch>(query, at, some);
        } else {
          for (int l = 0; l < rows && k + j + l < to; ++l) {
            V one[rows][1] = {};
            lanes<fetch>(query, at + l * key_row, one);
            for (int r = 0; r < rows; ++r) some[r][l] = one[r][0];
          }
        }
        for (int r = 0; r < rows; ++r) {
          for (int l = 0; l < rows; ++l) sum[r][j + l] = some[r][l];
        }
      }
      float lane[16];
      S::store(lane, sums_of_lanes(&sum[0][0]) * S::set(scale));
      for (int r = 0; r < rows; ++r) __builtin_memcpy(x + (row + r) * x_row + k, lane + r * columns, 4 * columns);
    }
  }
#else
  template <bool fetch, int rows>
  void run(int64_t row, int64_t from, int64_t to) const {
    const float* query = this->query + row * row_entries(width);
    for (int64_t k = from; k < to; ++k) {
      V sum[rows][1] = {};
      lanes<fetch>(query, key + k * key_row, sum);
      for (int r = 0; r < rows; ++r) x[(row + r) * x_row + k] = S::sum(sum[r][0]) * scale;
    }
    for (int r = 0; r < rows; ++r) {
      for (int64_t k = to; k < padded(to); ++k) x[(row + r) * x_row + k] = 0;
    }
  }
#endif

  // Some keys for all rows, and then the next: they are read once from memory.
  void run(int64_t rows, int64_t from, int64_t to) const {
    for (int64_t next; from < to; from = next) {
      next = min(from + cached_keys, to);
      each_rows(rows, [&]<int n>(int64_t r) { r == 0 ? run<true, n>(r, from, next) : run<false, n>(r, from, next); });
    }
  }
};

// x of all queries in `query`, with keys [from, to) of those that begin at `first_key`.
template <class T>
void few_scores(const AttentionJob& job, const float* query, int64_t rows, const Place& first_key, int64_t from,
                int64_t to, float* x, int64_t x_row) {
  const int64_t ahead = InPlace<T>::rows_ahead(job.width) * job.key.row;
  const T* key = row_of<const T>(job.key, first_key);
  Dots<T>{query, key, job.key.row, job.width, ahead, job.scale, x, x_row}.run(rows, from, to);
}

}  // namespace
}  // namespace multimax::MULTIMAX_ISA
