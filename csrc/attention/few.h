// Attention's forward for few queries and many keys, as in decoding. Memory is the limit: keys and values are read
// once, in order and in place, by the queries of all heads that share them.
#pragma once

#include "attention/forward.h"

namespace multimax::MULTIMAX_ISA {
namespace {

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

template <class T>
struct Few {
  using M = Memory<S, T>;
  static constexpr int64_t step = S::width * terms;  // terms of a vector of entries

  const AttentionJob& job;
  const ForwardScratch& w;
  const Forward forward{job, w};

  // A vector of a row's entries, in place.
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
    if constexpr (terms == 1) {
      return M::load(p, part.n);
    } else {
      V a{};
      __builtin_memcpy(&a, p, static_cast<size_t>(part.n) * sizeof(T));
      return a;
    }
  }

  // The dot products of `rows` queries with `columns` keys, as vectors yet to be summed over their lanes.
  template <int rows, int columns>
  MULTIMAX_INLINE void dots(const float* query, const T* key, int64_t key_row, V (&sum)[rows][columns]) const {
    const int64_t query_row = row_entries(job.width);
    auto add = [&](int64_t i, auto part) __attribute__((always_inline)) {
      V of_query[rows];
      for (int r = 0; r < rows; ++r) of_query[r] = S::load(query + r * query_row + i / terms);
      for (int k = 0; k < columns; ++k) {
        const V of_key = load(key + k * key_row + i, part);
        for (int r = 0; r < rows; ++r) sum[r][k] = Terms::add(sum[r][k], of_key, of_query[r]);
      }
    };
    int64_t i = 0;
    for (; i + step <= job.width; i += step) add(i, Whole{});
    if (i < job.width) add(i, Part{static_cast<int>(job.width - i)});
  }

  // x of rows [row, row + rows) and keys [from, to) of the tile
  template <int rows>
  void scores(int64_t row, const T* key, int64_t from, int64_t to) const {
    const float* query = w.query + row * row_entries(job.width);
    float* x = w.tile + row * few_keys;
    int64_t k = from;
#if defined(__AVX512F__)
    constexpr int columns = 16 / rows;  // 16 sums at a time, of as many keys at once as there are rows
    for (; k + columns <= to; k += columns) {
      V sum[rows][columns];
      for (int j = 0; j < columns; j += rows) {
        V some[rows][rows] = {};
        dots(query, key + (k + j) * job.key.row, job.key.row, some);
        for (int r = 0; r < rows; ++r) {
          for (int l = 0; l < rows; ++l) sum[r][j + l] = some[r][l];
        }
      }
      float lanes[16];
      S::store(lanes, sums_of_lanes(&sum[0][0]) * S::set(job.scale));
      for (int r = 0; r < rows; ++r) __builtin_memcpy(x + r * few_keys + k, lanes + r * columns, 4 * columns);
    }
#endif
    for (; k < to; ++k) {
      V sum[rows][1] = {};
      dots(query, key + k * job.key.row, job.key.row, sum);
      for (int r = 0; r < rows; ++r) x[r * few_keys + k] = S::sum(sum[r][0]) * job.scale;
    }
  }

  // `vectors` vectors of one row of values; or of two, in pairs, whose columns are then in the order of `in_order`.
  template <int vectors, class P>
  MULTIMAX_INLINE static void load_values(V* to, const T* row, [[maybe_unused]] const T* next, P part) {
#if defined(__AVX512BF16__)
    for (int j = 0; j < vectors; j += 2) {
      __m512i a = reinterpret_cast<__m512i>(load(row + 16 * j, part));
      __m512i b = next ? reinterpret_cast<__m512i>(load(next + 16 * j, part)) : __m512i{};
      to[j] = reinterpret_cast<V>(_mm512_unpacklo_epi16(a, b));
      to[j + 1] = reinterpret_cast<V>(_mm512_unpackhi_epi16(a, b));
    }
#else
    for (int j = 0; j < vectors; ++j) to[j] = load(row + S::width * j, part);
#endif
  }

  static void in_order([[maybe_unused]] float* row, [[maybe_unused]] int64_t columns) {
#if defined(__AVX512BF16__)
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int64_t i = 0; i < columns; i += 32) {
      V a = S::load(row + i), b = S::load(row + i + 16);
      S::store(row + i, _mm512_permutex2var_ps(a, low, b));
      S::store(row + i + 16, _mm512_permutex2var_ps(a, high, b));
    }
#endif
  }

  // out = diag(factor) out + p value: rows from `row`, vectors from `column` on
  template <int rows, int vectors, class P>
  void add_values(const float* p, const T* value, int64_t row, int64_t column, int64_t begin, int64_t end,
                  P part) const {
    float* out = w.out + row * out_row() + column;
    const float* weights = p + row * few_keys;
    for (int64_t first = begin / terms * terms, next; first < end; first = next) {
      next = min(first + TileProduct::most * terms, end);
      V sum[rows][vectors] = {};
      auto add = [&](int64_t k, const T* at, const T* below) __attribute__((always_inline)) {
        V of_value[vectors];
        load_values<vectors>(of_value, at, below, part);
        for (int r = 0; r < rows; ++r) {
          const V weight = S::set(weights[r * few_keys + k / terms]);
          for (int j = 0; j < vectors; ++j) sum[r][j] = Terms::add(sum[r][j], weight, of_value[j]);
        }
      };
      int64_t k = first;
      const T* at = value + k * job.value.row + column;
      for (; k + terms <= next; k += terms, at += terms * job.value.row) add(k, at, at + job.value.row);
      if (k < next) add(k, at, nullptr);
      for (int r = 0; r < rows; ++r) {
        const V factor = S::set(first <= begin ? w.factor[row + r] : 1);
        for (int j = 0; j < vectors; ++j) {
          float* to = out + r * out_row() + j * S::width;
          S::store(to, S::load(to) * factor + sum[r][j]);
        }
      }
    }
  }

  template <int rows>
  void add_values(const float* p, const T* value, int64_t row, int64_t begin, int64_t end) const {
    const int64_t width = job.value_width;
    int64_t column = 0;
    auto panels = [&]<int vectors>() {
      for (; column + vectors * S::width <= width; column += vectors * S::width) {
        add_values<rows, vectors>(p, value, row, column, begin, end, Whole{});
      }
    };
    if constexpr (rows == 1) panels.template operator()<8>();  // as many as registers hold
    panels.template operator()<4>();
    panels.template operator()<terms>();  // of pairs, two at least
    if (column < width) {
      add_values<rows, terms>(p, value, row, column, begin, end, Part{static_cast<int>(width - column)});
    }
  }

  int64_t out_row() const { return ceil_div(job.value_width, step) * step; }

  // Calls f with the first of every four rows, two or one that are left.
  template <class F>
  static void each_rows(int64_t rows, F f) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) f.template operator()<4>(r);
    if (rows & 2) f.template operator()<2>(r), r += 2;
    if (rows & 1) f.template operator()<1>(r);
  }

  // The first rows of what comes next: the machine fetches the others by itself, once it has seen where this goes.
  static void prefetch(const T* rows, int64_t distance, int64_t n, int64_t width) {
    for (int64_t i = 0; i < min(n, 16); ++i) {
      const char* row = reinterpret_cast<const char*>(rows + i * distance);
      for (int64_t at = 0; at < width * static_cast<int64_t>(sizeof(T)); at += 64) __builtin_prefetch(row + at);
    }
  }

  // The queries of all heads that share a key head, against one split of the keys.
  void run(int64_t item) const {
    int64_t split = item % job.splits, key_head = item / job.splits % job.key_heads();
    int64_t b = item / job.splits / job.key_heads(), first_head = key_head * job.group;
    const Sequence sequence(job, b);
    const Band band(job, sequence);
    int64_t queries = sequence.queries, rows = job.group * queries;
    for (int64_t h = 0; h < job.group; ++h) {
      Rows<T>::pack(w.query + h * queries * row_entries(job.width), job.query,
                    {b, first_head + h, sequence.first_query}, queries, job.width);
    }
    forward.clear(rows, out_row());

    int64_t last_key = min((split + 1) * job.split_keys, sequence.keys);
    for (int64_t first = split * job.split_keys; first < last_key; first += few_keys) {
      int64_t keys = min(few_keys, last_key - first);
      Tile t{b, 0, 0, queries, first, 0, 0, false, nullptr, few_keys};
      if (!clip(t, band, keys)) continue;
      bool left[few_rows], any = false;
      for (int64_t h = 0; h < job.group; ++h) {
        t.head = first_head + h;
        left[h] = any_left(job, t);
        any = any || left[h];
      }
      if (!any) continue;

      const Place at{b, key_head, sequence.first_key + first};
      const T *key = row_of<const T>(job.key, at), *value = row_of<const T>(job.value, at);
      each_rows(rows, [&]<int n>(int64_t r) { scores<n>(r, key, t.from(), t.end); });
      prefetch(value + t.begin * job.value.row, job.value.row, t.end - t.begin, job.value_width);
      any = false;
      for (int64_t h = 0; h < job.group; ++h) {
        int64_t row = h * queries;
        t.head = first_head + h;
        t.x = w.tile + row * few_keys;
        if (left[h] && forward.weigh(t, band, w.top + row, w.total + row * S::width, w.factor + row)) {
          any = true;
          continue;
        }
        for (int64_t r = row; r < row + queries; ++r) {
          w.factor[r] = 1;
          for (int64_t c = t.from(); c < t.to(); c += S::width) S::store(w.tile + r * few_keys + c, V{});
        }
      }
      if (!any) continue;
      if (first + keys < last_key) prefetch(key + keys * job.key.row, job.key.row, last_key - first - keys, job.width);
      const float* p = along_rows(w.tile, few_keys, rows, t.from(), t.to(), w.tile);
      each_rows(rows, [&]<int n>(int64_t r) { add_values<n>(p, value, r, t.begin, t.end); });
    }

    for (int64_t r = 0; r < rows; ++r) {
      float* out = w.out + r * out_row();
      in_order(out, out_row());
      forward.finish_part(split, {b, first_head + r / queries, sequence.first_query + r % queries}, out, w.top[r],
                          S::sum(S::load(w.total + r * S::width)));
    }
  }
};

}  // namespace
}  // namespace multimax::MULTIMAX_ISA
