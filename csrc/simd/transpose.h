// Matrices, transposed block by block.
#pragma once

#include "simd/memory.h"

namespace multimax::MULTIMAX_ISA {

#if defined(__AVX512F__)

// 16 x 16, in four rounds of exchanges
MULTIMAX_INLINE void transpose(__m512 (&r)[16]) {
  __m512 t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

inline void transpose_block(float* to, int64_t to_row, const float* from, int64_t from_row) {
  __m512 r[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_ps(from + i * from_row);
  transpose(r);
  for (int i = 0; i < 16; ++i) _mm512_storeu_ps(to + i * to_row, r[i]);
}

#else

inline void transpose_block(float* to, int64_t to_row, const float* from, int64_t from_row) {
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) to[i * to_row + j] = from[j * from_row + i];
  }
}

#endif

// A vector's width of rows as `n` columns of that height, one after the other, and back.
template <class T, int width>
struct Columns {
  static constexpr bool in_registers = false;

  static void of_rows(T* to, const T* from, int64_t row, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      for (int lane = 0; lane < width; ++lane) to[i * width + lane] = from[lane * row + i];
    }
  }
  static void to_rows(T* to, int64_t row, const T* from, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      for (int lane = 0; lane < width; ++lane) to[lane * row + i] = from[i * width + lane];
    }
  }
};

#if defined(__AVX512F__)

template <>
struct Columns<float, 16> {
  static constexpr bool in_registers = true;

  static void of_rows(float* to, const float* from, int64_t row, int64_t n) {
    for (; n > 0; n -= 16, to += 256, from += 16) {
      const int there = static_cast<int>(n < 16 ? n : 16);
      const auto lanes = static_cast<__mmask16>((1u << there) - 1);
      __m512 r[16];
      for (int i = 0; i < 16; ++i) fetch_ahead(from + i * row);
      for (int i = 0; i < 16; ++i) r[i] = _mm512_maskz_loadu_ps(lanes, from + i * row);
      transpose(r);
      for (int i = 0; i < 16; ++i) {
        if (i < there) _mm512_storeu_ps(to + i * 16, r[i]);
      }
    }
  }
  static void to_rows(float* to, int64_t row, const float* from, int64_t n) {
    for (; n > 0; n -= 16, to += 16, from += 256) {
      const int there = static_cast<int>(n < 16 ? n : 16);
      const auto lanes = static_cast<__mmask16>((1u << there) - 1);
      __m512 r[16] = {};
      for (int i = 0; i < 16; ++i) {
        if (i < there) r[i] = _mm512_loadu_ps(from + i * 16);
      }
      transpose(r);
      for (int i = 0; i < 16; ++i) fetch_ahead<true>(to + i * row);
      for (int i = 0; i < 16; ++i) _mm512_mask_storeu_ps(to + i * row, lanes, r[i]);
    }
  }
};

// Two neighbours of 16 bits are exchanged as one of 32, then taken apart.
template <class Half>
struct HalfColumns {
  static constexpr bool in_registers = true;

  static void of_rows(Half* to, const Half* from, int64_t row, int64_t n) {
    for (; n > 0; n -= 32, to += 512, from += 32) {
      const int there = static_cast<int>(n < 32 ? n : 32);
      const auto lanes = static_cast<__mmask32>((uint64_t{1} << there) - 1);
      __m512 r[16];
      for (int i = 0; i < 16; ++i) fetch_ahead(from + i * row);
      for (int i = 0; i < 16; ++i) r[i] = _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(lanes, from + i * row));
      transpose(r);
      for (int i = 0; i < 16; ++i) {
        const __m512i pair = _mm512_castps_si512(r[i]);
        if (2 * i < there) store(to + 32 * i, _mm512_cvtepi32_epi16(pair));
        if (2 * i + 1 < there) store(to + 32 * i + 16, _mm512_cvtepi32_epi16(_mm512_srli_epi32(pair, 16)));
      }
    }
  }
  static void to_rows(Half* to, int64_t row, const Half* from, int64_t n) {
    for (; n > 0; n -= 32, to += 32, from += 512) {
      const int there = static_cast<int>(n < 32 ? n : 32);
      const auto lanes = static_cast<__mmask32>((uint64_t{1} << there) - 1);
      __m512 r[16] = {};
      for (int i = 0; i < 16; ++i) {
        __m512i pair{};
        if (2 * i < there) pair = load(from + 32 * i);
        if (2 * i + 1 < there) pair = _mm512_or_si512(pair, _mm512_slli_epi32(load(from + 32 * i + 16), 16));
        r[i] = _mm512_castsi512_ps(pair);
      }
      transpose(r);
      for (int i = 0; i < 16; ++i) fetch_ahead<true>(to + i * row);
      for (int i = 0; i < 16; ++i) _mm512_mask_storeu_epi16(to + i * row, lanes, _mm512_castps_si512(r[i]));
    }
  }

 private:
  static __m512i load(const Half* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void store(Half* p, __m256i a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }
};

template <>
struct Columns<bf16, 16> : HalfColumns<bf16> {};
template <>
struct Columns<f16, 16> : HalfColumns<f16> {};

#endif

}  // namespace multimax::MULTIMAX_ISA
