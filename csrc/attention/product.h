// Products of small matrices, the work of attention: C = A B on tiles that lie in the caches.
#pragma once

#include "simd/simd.h"

namespace multimax::MULTIMAX_ISA {

enum class Start {
  zero,    // C = A B
  add,     // C += A B
  scaled,  // C = diag(scale) C + A B
};

// One term per entry of A and B.
template <class S>
struct Singly {
  static constexpr int terms = 1;
  static typename S::V add(typename S::V sum, typename S::V a, typename S::V b) { return sum + a * b; }
};

#if defined(__AVX512BF16__)
// Entries are pairs of bfloat16: two terms, multiplied exactly and added in float32.
template <class S>
struct InPairs {
  static constexpr int terms = 2;
  static __m512 add(__m512 sum, __m512 a, __m512 b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};
#endif

// A by the distances of its rows and columns, so that it may be transposed; B and C by the distance of their rows,
// whose entries lie side by side. B and C have `columns` columns, a multiple of the vector's width. Everything is
// counted in entries.
template <class S, class Terms>
struct Product {
  using T = typename S::T;
  using V = typename S::V;

  // A block of C lives in registers: 24 or 12 of them, the rest holds a row of B and an entry of A.
  static constexpr int block_rows = 6;
  static constexpr int block_vectors = vector_registers == 32 ? 4 : 2;
  static constexpr int64_t most = 64;  // entries summed in one go: sums of sums round less

  const T* a;
  int64_t a_row, a_column;
  const T* b;
  int64_t b_row;
  T* c;
  int64_t c_row;
  int64_t depth;
  T factor;  // of A B
  Start start;
  const T* scale;  // one per row of C, for Start::scaled

  template <int rows, int vectors>
  MULTIMAX_INLINE void block(int64_t row, int64_t column) const {
    const T* a = this->a + row * a_row;
    const T* b = this->b + column;
    T* c = this->c + row * c_row + column;
    const int64_t a_row = this->a_row, a_column = this->a_column, b_row = this->b_row, c_row = this->c_row;
    V sum[rows][vectors] = {};
    for (int64_t k = 0; k < depth; ++k) {
      V of_b[vectors];
      for (int j = 0; j < vectors; ++j) of_b[j] = S::load(b + j * S::width);
      for (int r = 0; r < rows; ++r) {
        V of_a = S::set(a[r * a_row]);
        for (int j = 0; j < vectors; ++j) sum[r][j] = Terms::add(sum[r][j], of_a, of_b[j]);
      }
      a += a_column;
      b += b_row;
    }
    // C comes last: what it holds may be the sum of many products, and rounding at its size once is enough
    const V factor = S::set(this->factor);
    for (int r = 0; r < rows; ++r) {
      const V scale = S::set(start == Start::scaled ? this->scale[row + r] : 1);
      for (int j = 0; j < vectors; ++j) {
        T* at = c + r * c_row + j * S::width;
        V result = sum[r][j] * factor;
        S::store(at, start == Start::zero ? result : S::load(at) * scale + result);
      }
    }
  }

  template <int vectors>
  __attribute__((noinline)) void panel(int64_t rows, int64_t column) const {
    int64_t row = 0;
    for (; row + block_rows <= rows; row += block_rows) block<block_rows, vectors>(row, column);
    switch (rows - row) {
      case 5:
        return block<5, vectors>(row, column);
      case 4:
        return block<4, vectors>(row, column);
      case 3:
        return block<3, vectors>(row, column);
      case 2:
        return block<2, vectors>(row, column);
      case 1:
        return block<1, vectors>(row, column);
    }
  }

  void run(int64_t rows, int64_t columns) const {
    if (depth <= most) return once(rows, columns);
    Product part = *this;
    for (int64_t done = 0; done < depth; done += most) {
      part.depth = depth - done < most ? depth - done : most;
      part.once(rows, columns);
      part.a += most * a_column;
      part.b += most * b_row;
      part.start = Start::add;
    }
  }

  void once(int64_t rows, int64_t columns) const {
    int64_t column = 0;
    for (; column + block_vectors * S::width <= columns; column += block_vectors * S::width) {
      panel<block_vectors>(rows, column);
    }
    switch ((columns - column) / S::width) {
      case 3:
        return panel<(block_vectors > 3 ? 3 : 1)>(rows, column);
      case 2:
        return panel<(block_vectors > 2 ? 2 : 1)>(rows, column);
      case 1:
        return panel<1>(rows, column);
    }
  }
};

}  // namespace multimax::MULTIMAX_ISA
