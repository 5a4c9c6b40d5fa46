// Vectors of the compute type, loaded from and stored to tensors of any of the four types.
#pragma once

#include "simd/simd.h"

namespace multimax::MULTIMAX_ISA {

using f32 = float;
using f64 = double;
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

template <class A, class B>
inline constexpr bool same = false;
template <class A>
inline constexpr bool same<A, A> = true;

template <class T>
struct Compute {
  using type = float;
};
template <>
struct Compute<double> {
  using type = double;
};

template <class To, class From>
inline To bit_cast(From a) {
  static_assert(sizeof(To) == sizeof(From));
  To b;
  __builtin_memcpy(&b, &a, sizeof b);
  return b;
}

template <class T>
inline T minus_infinity() {
  if constexpr (same<T, bf16>) {
    return {0xff80u};
  } else if constexpr (same<T, f16>) {
    return {0xfc00u};
  } else {
    return -static_cast<T>(__builtin_inf());
  }
}

// Half of the lowest finite value of tensors of type T: entries at or below it count as masked.
template <class T>
inline constexpr float masked_floor = -0x1.fffffep126f;
template <>
inline constexpr double masked_floor<double> = -0x1.fffffffffffffp1022;
template <>
inline constexpr float masked_floor<bf16> = -0x1.fep126f;
template <>
inline constexpr float masked_floor<f16> = -32752.0f;

inline float widen(bf16 a) { return bit_cast<float>(static_cast<uint32_t>(a.bits) << 16); }
inline float widen(f16 a) {
#if defined(__F16C__)
  return _cvtsh_ss(a.bits);
#else
  // shift exponent and fraction into place, then let a multiplication mend the bias (subnormals included)
  uint32_t sign = static_cast<uint32_t>(a.bits & 0x8000u) << 16;
  uint32_t magnitude = static_cast<uint32_t>(a.bits & 0x7fffu) << 13;
  float value = bit_cast<float>(magnitude) * 0x1p112f;
  if ((a.bits & 0x7c00u) == 0x7c00u) value = bit_cast<float>(magnitude | 0x7f800000u);
  return bit_cast<float>(bit_cast<uint32_t>(value) | sign);
#endif
}

inline void narrow(float a, bf16& out) {
  uint32_t u = bit_cast<uint32_t>(a);
  uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;  // to nearest, ties to even
  out.bits = static_cast<uint16_t>(a != a ? 0x7fc0u : rounded);
}
inline void narrow(float a, f16& out) {
#if defined(__F16C__)
  out.bits = static_cast<uint16_t>(_cvtss_sh(a, _MM_FROUND_TO_NEAREST_INT));
#else
  uint32_t u = bit_cast<uint32_t>(a), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  uint32_t bits;
  if (a != a) {
    bits = 0x7e00u;
  } else if (bit_cast<float>(magnitude) >= 65520.0f) {
    bits = 0x7c00u;
  } else if (bit_cast<float>(magnitude) < 0x1p-14f) {
    // adding 1/2 rounds to a multiple of 2^-24, the spacing of the subnormal numbers
    bits = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    bits = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  out.bits = static_cast<uint16_t>(sign | bits);
#endif
}

// For what lies one after the other: the machine's own prefetching ends with each page of 4096 bytes; this goes on.
constexpr int64_t page = 4096;
template <bool to_write = false>
MULTIMAX_INLINE void fetch_ahead(const void* p, int64_t bytes = page) {
  __builtin_prefetch(static_cast<const char*>(p) + bytes, to_write);
}

// Which of a vector's lanes there are: all of them, or the first n.
struct Whole {};
struct Part {
  int n;
};

// Tensors of the compute type itself.
template <class S, class T>
struct Memory {
  using V = typename S::V;
  static V load(const T* p) { return S::load(p); }
  static V load(const T* p, int n) { return S::load(p, n); }
  static void store(T* p, V a) { S::store(p, a); }
  static void store(T* p, V a, int n) { S::store(p, a, n); }
};

// Half types, element by element; what has instructions for whole vectors follows.
template <class S, class Half>
struct HalfMemory {
  using V = typename S::V;
  MULTIMAX_APART static V load(const Half* p, int n) {
    V a{};
    for (int i = 0; i < n; ++i) a[i] = widen(p[i]);
    return a;
  }
  MULTIMAX_APART static void store(Half* p, V a, int n) {
    for (int i = 0; i < n; ++i) narrow(a[i], p[i]);
  }
};

#if defined(__AVX512F__)

template <class S>
struct Memory<S, bf16> {
  using V = __m512;
  static V wide(__m256i a) {  // one permutation of words: to the upper half of each lane, the lower half zero
    const __m512i upper =
        _mm512_slli_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 16);
    return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, upper, _mm512_castsi256_si512(a)));
  }
#if defined(__AVX512BF16__)  // one instruction; numbers too small to be normal become 0
  static __m256i half(V a) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a)); }
#else
  static __m256i half(V a) {
    __m512i u = _mm512_castps_si512(a);
    __m512i even = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), even);
    rounded = _mm512_mask_blend_epi32(S::nan(a), rounded, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  }
#endif
  static V load(const bf16* p) { return wide(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static V load(const bf16* p, int n) { return wide(_mm256_maskz_loadu_epi16(S::first(n), p)); }
  static void store(bf16* p, V a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half(a)); }
  static void store(bf16* p, V a, int n) { _mm256_mask_storeu_epi16(p, S::first(n), half(a)); }
};

template <class S>
struct Memory<S, f16> {
  using V = __m512;
  static __m256i half(V a) { return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT); }
  static V load(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static V load(const f16* p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(S::first(n), p)); }
  static void store(f16* p, V a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half(a)); }
  static void store(f16* p, V a, int n) { _mm256_mask_storeu_epi16(p, S::first(n), half(a)); }
};

#elif defined(__AVX2__)

template <class S>
struct Memory<S, bf16> : HalfMemory<S, bf16> {
  using V = typename S::V;
  using HalfMemory<S, bf16>::load;
  using HalfMemory<S, bf16>::store;
  static V load(const bf16* p) {
    __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static void store(bf16* p, V a) {
    __m256i u = _mm256_castps_si256(a);
    __m256i even = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), even);
    __m256i nan = reinterpret_cast<__m256i>(S::nan(a));
    rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan), 16);
    __m128i bits = _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bits);
  }
};

template <class S>
struct Memory<S, f16> : HalfMemory<S, f16> {
  using V = typename S::V;
  using HalfMemory<S, f16>::load;
  using HalfMemory<S, f16>::store;
  static V load(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static void store(f16* p, V a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
  }
};

#elif defined(__aarch64__)

// Half types as four lanes of 16 bits; `Convert` has what depends on the type.
template <class S, class Half, class Convert>
struct NeonMemory {
  using V = typename S::V;
  static V load(const Half* p) { return Convert::wide(vld1_u16(&p->bits)); }
  static void store(Half* p, V a) { vst1_u16(&p->bits, Convert::half(a)); }
  MULTIMAX_INLINE static V load(const Half* p, int n) {
    uint16x4_t bits = vdup_n_u16(0);
    if (n > 0) bits = vld1_lane_u16(&p[0].bits, bits, 0);
    if (n > 1) bits = vld1_lane_u16(&p[1].bits, bits, 1);
    if (n > 2) bits = vld1_lane_u16(&p[2].bits, bits, 2);
    if (n > 3) bits = vld1_lane_u16(&p[3].bits, bits, 3);
    return Convert::wide(bits);
  }
  MULTIMAX_INLINE static void store(Half* p, V a, int n) {
    const uint16x4_t bits = Convert::half(a);
    if (n > 0) vst1_lane_u16(&p[0].bits, bits, 0);
    if (n > 1) vst1_lane_u16(&p[1].bits, bits, 1);
    if (n > 2) vst1_lane_u16(&p[2].bits, bits, 2);
    if (n > 3) vst1_lane_u16(&p[3].bits, bits, 3);
  }
};

struct ConvertBF16 {
  static float32x4_t wide(uint16x4_t a) { return vreinterpretq_f32_u32(vshll_n_u16(a, 16)); }
  static uint16x4_t half(float32x4_t a) {
    uint32x4_t u = vreinterpretq_u32_f32(a);
    uint32x4_t even = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    uint16x4_t rounded = vaddhn_u32(u, vaddq_u32(even, vdupq_n_u32(0x7fff)));  // the upper halves of the sums
    return vbsl_u16(vmovn_u32(vceqq_f32(a, a)), rounded, vdup_n_u16(0x7fc0));
  }
};
struct ConvertF16 {
  static float32x4_t wide(uint16x4_t a) { return vcvt_f32_f16(vreinterpret_f16_u16(a)); }
  static uint16x4_t half(float32x4_t a) { return vreinterpret_u16_f16(vcvt_f16_f32(a)); }
};

template <class S>
struct Memory<S, bf16> : NeonMemory<S, bf16, ConvertBF16> {};
template <class S>
struct Memory<S, f16> : NeonMemory<S, f16, ConvertF16> {};

#else

template <class S, class Half>
struct WholeHalfMemory : HalfMemory<S, Half> {
  using V = typename S::V;
  using HalfMemory<S, Half>::load;
  using HalfMemory<S, Half>::store;
  static V load(const Half* p) {
    V a{};
    for (int i = 0; i < S::width; ++i) a[i] = widen(p[i]);
    return a;
  }
  static void store(Half* p, V a) {
    for (int i = 0; i < S::width; ++i) narrow(a[i], p[i]);
  }
};
template <class S>
struct Memory<S, bf16> : WholeHalfMemory<S, bf16> {};
template <class S>
struct Memory<S, f16> : WholeHalfMemory<S, f16> {};

#endif

}  // namespace multimax::MULTIMAX_ISA
