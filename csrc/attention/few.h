// Attention's forward for few queries and many keys, as in decoding. Memory is the limit: keys and values are read
// once, in order and in place, by the queries of all heads that share them.
#pragma once

#include "attention/dots.h"
#include "attention/forward.h"

namespace multimax::MULTIMAX_ISA {
namespace {

template <class T>
struct Few {
  using In = InPlace<T>;

  const AttentionJob& job;
  const ForwardScratch& w;
  const Forward forward{job, w};

  // `vectors` vectors of one row of values; or of two, in pairs, whose columns are then in the order of `in_order`.
  template <int vectors, class P>
  MULTIMAX_INLINE static void load_values(V* to, const T* row, [[maybe_unused]] const T* next, P part) {
#if defined(__AVX512BF16__)
    for (int j = 0; j < vectors; j += 2) {
      __m512i a = reinterpret_cast<__m512i>(In::load(row + 16 * j, part));
      __m512i b = next ? reinterpret_cast<__m512i>(In::load(next + 16 * j, part)) : __m512i{};
      to[j] = reinterpret_cast<V>(_mm512_unpacklo_epi16(a, b));
      to[j + 1] = reinterpret_cast<V>(_mm512_unpackhi_epi16(a, b));
    }
#else
    for (int j = 0; j < vectors; ++j) to[j] = In::load(row + S::width * j, part);
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

  // out = diag(factor) out + p value: rows from `row`, vectors from `column` on, of keys [begin, end)
  template <bool fetch, int rows, int vectors, class P>
  void add_values(const float* p, const T* value, int64_t row, int64_t column, int64_t begin, int64_t end, bool first,
                  P part) const {
    float* out = w.out + row * out_row() + column;
    const float* weights = p + row * few_keys;
    const int64_t value_row = job.value.row, ahead = In::rows_ahead(job.value_width) * value_row;
    V sum[rows][vectors] = {};
    auto add = [&](int64_t k, const T* at, const T* below) __attribute__((always_inline)) {
      if constexpr (fetch) {
        // the rows as a whole with the first of their columns: they lie in this order
        for (int64_t i = 0; i < job.value_width; i += 64 / static_cast<int64_t>(sizeof(T))) {
          for (int64_t j = 0; j < terms; ++j) __builtin_prefetch(at + ahead + j * value_row + i);
        }
      }
      V of_value[vectors];
      load_values<vectors>(of_value, at, below, part);
      for (int r = 0; r < rows; ++r) {
        const V weight = S::set(weights[r * few_keys + k / terms]);
        for (int j = 0; j < vectors; ++j) sum[r][j] = Terms::add(sum[r][j], weight, of_value[j]);
      }
    };
    int64_t k = begin;
    const T* at = value + k * value_row + column;
    for (; k + terms <= end; k += terms, at += terms * value_row) add(k, at, at + value_row);
    if (k < end) add(k, at, nullptr);
    for (int r = 0; r < rows; ++r) {
      const V factor = S::set(first ? w.factor[row + r] : 1);
      for (int j = 0; j < vectors; ++j) {
        float* to = out + r * out_row() + j * S::width;
        S::store(to, S::load(to) * factor + sum[r][j]);
      }
    }
  }

  template <int rows>
  void add_values(const float* p, const T* value, int64_t row, int64_t begin, int64_t end, bool first) const {
    const int64_t width = job.value_width;
    int64_t column = 0;
    auto panel = [&]<int vectors>(auto part) {
      if (row == 0 && column == 0) {
        add_values<true, rows, vectors>(p, value, row, column, begin, end, first, part);
      } else {
        add_values<false, rows, vectors>(p, value, row, column, begin, end, first, part);
      }
      column += vectors * S::width;
    };
    auto panels = [&]<int vectors>() {
      while (column + vectors * S::width <= width) panel.template operator()<vectors>(Whole{});
    };
    if constexpr (rows == 1) panels.template operator()<8>();  // as many as registers hold
    panels.template operator()<4>();
    panels.template operator()<terms>();  // of pairs, two at least
    if (column < width) panel.template operator()<terms>(Part{static_cast<int>(width - column)});
  }

  // Some values for all rows, and then the next: they are read once from memory.
  void add_values(const float* p, const T* value, int64_t rows, int64_t begin, int64_t end) const {
    begin = begin / terms * terms;
    for (int64_t from = begin, next; from < end; from = next) {
      next = min(from + cached_keys, end);
      each_rows(rows, [&]<int n>(int64_t r) { add_values<n>(p, value, r, from, next, from == begin); });
    }
  }

  int64_t out_row() const { return ceil_div(job.value_width, In::step) * In::step; }

  // The first rows of what comes next; each of them then fetches another, further on.
  static void prefetch(const T* rows, int64_t distance, int64_t n, int64_t width) {
    for (int64_t i = 0; i < min(n, In::rows_ahead(width)); ++i) {
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
      few_scores<T>(job, w.query, rows, at, t.from(), t.end, w.tile, few_keys);
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
      add_values(p, value, rows, t.begin, t.end);
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
