// Rows of tensors and tiles of scores, as the products take them; and rows of results back.
//
// Entries are floats, one term of a sum each. Where the machine multiplies bfloat16, this is compiled for tensors of
// that type alone, and an entry is a pair: two terms that follow each other along the sum. So a matrix that is summed
// along its rows has other entries than one that is summed down its columns.
#pragma once

#include "attention/attention.h"
#include "attention/product.h"
#include "simd/transpose.h"

namespace multimax::MULTIMAX_ISA {
namespace {

using S = Simd<float>;
using V = S::V;

inline int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

#if defined(__AVX512BF16__)
using Terms = InPairs<S>;
#else
using Terms = Singly<S>;
#endif
using TileProduct = Product<S, Terms>;
constexpr int64_t terms = Terms::terms;

// Entries for n terms, and the distance of rows that are summed along them.
inline int64_t entries(int64_t n) { return ceil_div(n, terms); }
inline int64_t row_entries(int64_t width) { return padded(entries(width)); }

template <class T>
inline void narrow_row(T* to, const float* from, int64_t n, V factor) {
  using M = Memory<S, T>;
  int64_t i = 0;
  for (; i + S::width <= n; i += S::width) M::store(to + i, S::load(from + i) * factor);
  if (i < n) M::store(to + i, S::load(from + i) * factor, static_cast<int>(n - i));
}

// what rounding took in narrow_row
template <class T>
inline void lost_row(T* to, const T* rounded, const float* from, int64_t n, V factor) {
  using M = Memory<S, T>;
  int64_t i = 0;
  for (; i + S::width <= n; i += S::width) M::store(to + i, S::load(from + i) * factor - M::load(rounded + i));
  int left = static_cast<int>(n - i);
  if (left) M::store(to + i, S::load(from + i) * factor - M::load(rounded + i, left), left);
}

// Where in (B, H, L, D) some rows begin.
struct Place {
  int64_t b, head, row;
};

template <class T>
inline T* row_of(const Heads& m, const Place& at) {
  return static_cast<T*>(m.data) + at.b * m.batch + at.head * m.head + at.row * m.row;
}

#if defined(__AVX512BF16__)

inline __m512i interleaved(__m256i a, __m256i b) {  // a0 b0 a1 b1 ...
  return _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
}

// n terms of a row, at most a vector of pairs; zeros behind them
inline V load_pairs(const bf16* p, int64_t n) {
  return reinterpret_cast<V>(_mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), p));
}

// One row, and zeros up to row_entries.
inline void pack_row(float* to, const bf16* from, int64_t n) {
  for (int64_t i = 0, at = 0; at < row_entries(n); i += 32, at += S::width) {
    S::store(to + at, load_pairs(from + i, min(max(n - i, 0), 32)));
  }
}

// Two rows to be summed down: one row of pairs. Without a second row, zeros.
inline void pack_down_rows(float* to, const bf16* row, const bf16* next, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    __mmask16 there = S::first(static_cast<int>(min(n - i, 16)));
    __m256i b = next ? _mm256_maskz_loadu_epi16(there, next + i) : __m256i{};
    _mm512_storeu_si512(to + i, interleaved(_mm256_maskz_loadu_epi16(there, row + i), b));
  }
}

// A tile of scores, to be summed along its rows: columns [from, to), which `result` has at half of their place. It may
// be the tile itself.
inline const float* along_rows(const float* tile, int64_t stride, int64_t rows, int64_t from, int64_t to,
                               float* result) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = from / 32 * 32; c < to; c += 32) {
      const float* at = tile + r * stride + c;
      __m512bh pairs = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(at + 16), _mm512_loadu_ps(at));
      _mm512_storeu_si512(result + r * stride + c / 2, reinterpret_cast<__m512i>(pairs));
    }
  }
  return result;
}

// The same, to be summed down: rows r and r + 1 in the place of r.
inline const float* down_columns(float* tile, int64_t stride, int64_t rows, int64_t from, int64_t to) {
  for (int64_t r = 0; r < rows; r += 2) {
    for (int64_t c = from; c < to; c += 16) {
      float* at = tile + r * stride + c;
      V next = r + 1 < rows ? S::load(at + stride) : V{};
      _mm512_storeu_si512(at, interleaved(Memory<S, bf16>::half(S::load(at)), Memory<S, bf16>::half(next)));
    }
  }
  return tile;
}

#else

// n numbers as float32, and zeros up to the row's padded width
template <class T>
inline void pack_row(float* to, const T* from, int64_t n) {
  using M = Memory<S, T>;
  int64_t i = 0;
  for (; i + S::width <= n; i += S::width) S::store(to + i, M::load(from + i));
  if (i < n) S::store(to + i, M::load(from + i, static_cast<int>(n - i))), i += S::width;
  for (; i < padded(n); i += S::width) S::store(to + i, V{});
}

inline const float* along_rows(const float* tile, int64_t, int64_t, int64_t, int64_t, float*) { return tile; }
inline const float* down_columns(const float* tile, int64_t, int64_t, int64_t, int64_t) { return tile; }

#endif

// What depends on the tensors' type: how their rows are read and written. All else is compiled once.
template <class T>
struct Rows {
  using M = Memory<S, T>;

  // Rows to be summed along.
  static void pack(float* to, const Heads& from, const Place& at, int64_t rows, int64_t width) {
    const T* first = row_of<const T>(from, at);
    for (int64_t i = 0; i < rows; ++i) pack_row(to + i * row_entries(width), first + i * from.row, width);
  }

  // The same, transposed: to (row_entries, keys padded to 16). rows: room for 16 of them.
  static void pack_transposed(float* to, int64_t to_row, float* rows, const Heads& from, const Place& at, int64_t keys,
                              int64_t width) {
    const int64_t row = row_entries(width);
    for (int64_t k = 0; k < padded(keys); k += 16) {
      pack(rows, from, {at.b, at.head, at.row + k}, min(16, keys - k), width);
      for (int64_t i = max(keys - k, 0) * row; i < 16 * row; i += S::width) S::store(rows + i, V{});
      for (int64_t d = 0; d < row; d += 16) transpose_block(to + d * to_row + k, to_row, rows + d, row);
    }
  }

  // Rows to be summed down: to (entries of rows, padded width).
  static void pack_down(float* to, const Heads& from, const Place& at, int64_t rows, int64_t width) {
#if defined(__AVX512BF16__)
    const T* row = row_of<const T>(from, at);
    for (int64_t i = 0; i < rows; i += 2, row += 2 * from.row) {
      pack_down_rows(to + i / 2 * padded(width), row, i + 1 < rows ? row + from.row : nullptr, width);
    }
#else
    pack(to, from, at, rows, width);
#endif
  }

  // The same, in place if they are float32 of a fitting width. distance: that of the rows of what results.
  static const float* down(const Heads& from, const Place& at, float* buffer, int64_t rows, int64_t width,
                           int64_t& distance) {
    if constexpr (same<T, float>) {
      distance = from.row;
      if (width % 16 == 0) return row_of<const float>(from, at);
    }
    distance = padded(width);
    pack_down(buffer, from, at, rows, width);
    return buffer;
  }

  static void write(const Heads& to, const Place& at, const float* from, int64_t n, V factor) {
    narrow_row(row_of<T>(to, at), from, n, factor);
  }

  // what rounding took in write()
  static void write_lost(const Heads& to, const Heads& written, const Place& at, const float* from, int64_t n,
                         V factor) {
    lost_row(row_of<T>(to, at), row_of<T>(written, at), from, n, factor);
  }

  // one row's sum of a b, added to sum
  static V dot(V sum, const Heads& a_rows, const Heads& b_rows, const Place& at, int64_t n) {
    const T *a = row_of<const T>(a_rows, at), *b = row_of<const T>(b_rows, at);
    int64_t i = 0;
    for (; i + S::width <= n; i += S::width) sum = sum + M::load(a + i) * M::load(b + i);
    int left = static_cast<int>(n - i);
    if (left) sum = sum + M::load(a + i, left) * M::load(b + i, left);
    return sum;
  }
};

struct RowAccess {
  decltype(&Rows<bf16>::pack) pack;
  decltype(&Rows<bf16>::pack_transposed) pack_transposed;
  decltype(&Rows<bf16>::pack_down) pack_down;
  decltype(&Rows<bf16>::down) down;
  decltype(&Rows<bf16>::write) write;
  decltype(&Rows<bf16>::write_lost) write_lost;
  decltype(&Rows<bf16>::dot) dot;
};

// f's result for the type of the tensors' rows.
template <class F>
inline auto with_row_type([[maybe_unused]] DType dtype, F f) {
#if !defined(__AVX512BF16__)
  if (dtype == DType::f32) return f.template operator()<float>();
  if (dtype == DType::f16) return f.template operator()<f16>();
#endif
  return f.template operator()<bf16>();
}

inline RowAccess row_access_of(DType dtype) {
  return with_row_type(dtype, []<class T>() {
    using R = Rows<T>;
    return RowAccess{R::pack, R::pack_transposed, R::pack_down, R::down, R::write, R::write_lost, R::dot};
  });
}

}  // namespace
}  // namespace multimax::MULTIMAX_ISA
