// Vectors of one instruction set, behind one small interface.
//
// This file is compiled once for each instruction set, so everything lives in a namespace named after
// it. What is compiled so uses nothing of the C++ library: an inline function of it, compiled here for a newer machine,
// could be the copy that the linker keeps for everybody. `+ - * /` are the compiler's own on vector types; only what
// they lack, or do slowly, is written here.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>  // read in a tenth of the time
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef MULTIMAX_ISA
#define MULTIMAX_ISA baseline
#endif

// Left to itself the compiler calls the larger ones, and every vector then travels through memory.
#define MULTIMAX_INLINE inline __attribute__((always_inline))
// Lanes one by one, at the ends of rows: long code, which the portable baseline is full of.
#if defined(__AVX2__)
#define MULTIMAX_APART
#else
#define MULTIMAX_APART __attribute__((noinline))
#endif

namespace multimax::MULTIMAX_ISA {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int vector_registers = 32;
#else
constexpr int vector_registers = 16;
#endif

// Vector types of the compiler, of whatever size the instruction set has registers for.
template <class Float, class Integer, class Unsigned, int fraction_bits_, int bytes>
struct VectorType {
  using T = Float;
  typedef Float V __attribute__((vector_size(bytes)));
  typedef Integer I __attribute__((vector_size(bytes)));
  typedef Unsigned U __attribute__((vector_size(bytes)));
  using Mask = I;
  static constexpr bool masks_arithmetic = false;
  static constexpr int width = bytes / static_cast<int>(sizeof(Float));
  static constexpr int fraction_bits = fraction_bits_;

  static V set(T a) { return a - V{}; }  // -0.0 + 0.0 is 0.0, and the addition would stay
  static V load(const T* p) {
    V a;
    __builtin_memcpy(&a, p, sizeof a);
    return a;
  }
  static void store(T* p, V a) { __builtin_memcpy(p, &a, sizeof a); }
  // the first n lanes only; the others are read as 0
  MULTIMAX_APART static V load(const T* p, int n) {
    V a{};
    for (int i = 0; i < n; ++i) a[i] = p[i];
    return a;
  }
  MULTIMAX_APART static void store(T* p, V a, int n) {
    for (int i = 0; i < n; ++i) p[i] = a[i];
  }

  // max returns its second operand if either is NaN
  static V max(V a, V b) { return select(a > b, a, b); }
  static Mask eq(V a, V b) { return a == b; }
  static Mask le(V a, V b) { return a <= b; }
  static Mask lt(V a, V b) { return a < b; }
  static Mask not_ge(V a, V b) { return ~(a >= b); }  // less, or NaN
  static Mask nan(V a) { return a != a; }
  static Mask first(int n) {
    Mask lane;
    for (int i = 0; i < width; ++i) lane[i] = i;
    return lane < (Mask{} + static_cast<Integer>(n));
  }
  static Mask both(Mask a, Mask b) { return a & b; }
  static Mask either(Mask a, Mask b) { return a | b; }
  static bool any(Mask m) {
    Integer r = 0;
    for (int i = 0; i < width; ++i) r |= m[i];
    return r != 0;
  }
  static bool all(Mask m) {
    Integer r = -1;
    for (int i = 0; i < width; ++i) r &= m[i];
    return r != 0;
  }
  static int count(Mask m) {
    int n = 0;
    for (int i = 0; i < width; ++i) n += m[i] != 0;
    return n;
  }
  // of bytes that are 0 or 1; the first n lanes only, the others are false
  static Mask truth(const unsigned char* p) { return truth(p, width); }
  static Mask truth(const unsigned char* p, int n) {
    Mask m{};
    for (int i = 0; i < n; ++i) m[i] = -static_cast<Integer>(p[i]);
    return m;
  }
  static V select(Mask m, V a, V b) {
    return reinterpret_cast<V>((reinterpret_cast<I>(a) & m) | (reinterpret_cast<I>(b) & ~m));
  }
  static V zero_if(Mask m, V a) { return reinterpret_cast<V>(reinterpret_cast<I>(a) & ~m); }
  static V sub_where(Mask m, V a, V b) { return reinterpret_cast<V>(reinterpret_cast<I>(a - b) & m); }  // else 0
  static V add_where(Mask m, V a, V b) { return a + reinterpret_cast<V>(reinterpret_cast<I>(b) & m); }  // else a

  // the chosen lanes, one after the other; returns their number. All lanes of p are written.
  static int compress(T* p, Mask m, V a) {
    int n = 0;
    for (int i = 0; i < width; ++i) {
      p[n] = a[i];
      n += m[i] != 0;
    }
    return n;
  }

  // to[i] += a[i] in double
  static void add_to(double* to, V a) {
    typedef double Doubles __attribute__((vector_size(width * sizeof(double))));
    Doubles sums;
    __builtin_memcpy(&sums, to, sizeof sums);
    sums += __builtin_convertvector(a, Doubles);
    __builtin_memcpy(to, &sums, sizeof sums);
  }
  static T sum(V a) {
    T r = a[0];
    for (int i = 1; i < width; ++i) r += a[i];
    return r;
  }
  static double wide_sum(V a) {
    double lane[width];
    for (int i = 0; i < width; ++i) lane[i] = static_cast<double>(a[i]);
    for (int half = width / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
    }
    return lane[0];
  }
  static T max(V a) {
    T r = a[0];
    for (int i = 1; i < width; ++i) r = a[i] > r ? a[i] : r;
    return r;
  }
};

template <class T>
struct Simd;

#if defined(__AVX512F__)

template <>
struct Simd<float> : VectorType<float, int32_t, uint32_t, 23, 64> {
  using Base = VectorType<float, int32_t, uint32_t, 23, 64>;
  using Mask = __mmask16;
  static constexpr bool masks_arithmetic = true;
  using Base::load;
  using Base::max;
  using Base::store;

  static V load(const T* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static void store(T* p, V a, int n) { _mm512_mask_storeu_ps(p, first(n), a); }
  static V max(V a, V b) { return _mm512_max_ps(a, b); }
  static Mask eq(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
  static Mask le(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
  static Mask lt(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static Mask not_ge(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_NGE_UQ); }
  static Mask nan(V a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
  static Mask first(int n) { return static_cast<Mask>((1u << n) - 1u); }
  static Mask both(Mask a, Mask b) { return static_cast<Mask>(a & b); }
  static Mask either(Mask a, Mask b) { return static_cast<Mask>(a | b); }
  static bool any(Mask m) { return m != 0; }
  static bool all(Mask m) { return m == 0xffff; }
  static int count(Mask m) { return __builtin_popcount(m); }
  static Mask truth(const unsigned char* p) {
    __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm_test_epi8_mask(bytes, bytes);
  }
  static Mask truth(const unsigned char* p, int n) {
    __m128i bytes = _mm_maskz_loadu_epi8(first(n), p);
    return _mm_test_epi8_mask(bytes, bytes);
  }
  static V select(Mask m, V a, V b) { return _mm512_mask_blend_ps(m, b, a); }
  static V zero_if(Mask m, V a) { return _mm512_maskz_mov_ps(static_cast<Mask>(~m), a); }
  static V sub_where(Mask m, V a, V b) { return _mm512_maskz_sub_ps(m, a, b); }
  static V add_where(Mask m, V a, V b) { return _mm512_mask_add_ps(a, m, a, b); }
  static V add_product_unless(Mask m, V sum, V a, V b) {
    return _mm512_mask3_fmadd_ps(a, b, sum, static_cast<Mask>(~m));
  }
  static int compress(T* p, Mask m, V a) {
    _mm512_storeu_ps(p, _mm512_maskz_compress_ps(m, a));
    return __builtin_popcount(m);
  }
  static T sum(V a) { return _mm512_reduce_add_ps(a); }
  static double wide_sum(V a) {
    return _mm512_reduce_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(a)) +
                                _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1)));
  }
  static T max(V a) { return _mm512_reduce_max_ps(a); }
};

template <>
struct Simd<double> : VectorType<double, int64_t, uint64_t, 52, 64> {
  using Base = VectorType<double, int64_t, uint64_t, 52, 64>;
  using Mask = __mmask8;
  static constexpr bool masks_arithmetic = true;
  using Base::load;
  using Base::max;
  using Base::store;

  static V load(const T* p, int n) { return _mm512_maskz_loadu_pd(first(n), p); }
  static void store(T* p, V a, int n) { _mm512_mask_storeu_pd(p, first(n), a); }
  static V max(V a, V b) { return _mm512_max_pd(a, b); }
  static Mask eq(V a, V b) { return _mm512_cmp_pd_mask(a, b, _CMP_EQ_OQ); }
  static Mask le(V a, V b) { return _mm512_cmp_pd_mask(a, b, _CMP_LE_OQ); }
  static Mask lt(V a, V b) { return _mm512_cmp_pd_mask(a, b, _CMP_LT_OQ); }
  static Mask not_ge(V a, V b) { return _mm512_cmp_pd_mask(a, b, _CMP_NGE_UQ); }
  static Mask nan(V a) { return _mm512_cmp_pd_mask(a, a, _CMP_UNORD_Q); }
  static Mask first(int n) { return static_cast<Mask>((1u << n) - 1u); }
  static Mask both(Mask a, Mask b) { return static_cast<Mask>(a & b); }
  static Mask either(Mask a, Mask b) { return static_cast<Mask>(a | b); }
  static bool any(Mask m) { return m != 0; }
  static bool all(Mask m) { return m == 0xff; }
  static int count(Mask m) { return __builtin_popcount(m); }
  static Mask truth(const unsigned char* p) { return truth(p, width); }
  static Mask truth(const unsigned char* p, int n) {
    __m128i bytes = _mm_maskz_loadu_epi8(first(n), p);
    return static_cast<Mask>(_mm_test_epi8_mask(bytes, bytes));
  }
  static V select(Mask m, V a, V b) { return _mm512_mask_blend_pd(m, b, a); }
  static V zero_if(Mask m, V a) { return _mm512_maskz_mov_pd(static_cast<Mask>(~m), a); }
  static V sub_where(Mask m, V a, V b) { return _mm512_maskz_sub_pd(m, a, b); }
  static V add_where(Mask m, V a, V b) { return _mm512_mask_add_pd(a, m, a, b); }
  static V add_product_unless(Mask m, V sum, V a, V b) {
    return _mm512_mask3_fmadd_pd(a, b, sum, static_cast<Mask>(~m));
  }
  static int compress(T* p, Mask m, V a) {
    _mm512_storeu_pd(p, _mm512_maskz_compress_pd(m, a));
    return __builtin_popcount(m);
  }
  static T sum(V a) { return _mm512_reduce_add_pd(a); }
  static double wide_sum(V a) { return sum(a); }
  static T max(V a) { return _mm512_reduce_max_pd(a); }
};

#elif defined(__AVX2__)

template <>
struct Simd<float> : VectorType<float, int32_t, uint32_t, 23, 32> {
  using Base = VectorType<float, int32_t, uint32_t, 23, 32>;
  using Base::load;
  using Base::max;
  using Base::store;

  static V load(const T* p, int n) { return _mm256_maskload_ps(p, reinterpret_cast<__m256i>(first(n))); }
  static void store(T* p, V a, int n) { _mm256_maskstore_ps(p, reinterpret_cast<__m256i>(first(n)), a); }
  static V max(V a, V b) { return _mm256_max_ps(a, b); }
  static bool any(Mask m) { return _mm256_movemask_ps(reinterpret_cast<V>(m)) != 0; }
  static bool all(Mask m) { return _mm256_movemask_ps(reinterpret_cast<V>(m)) == 0xff; }
  static int count(Mask m) { return __builtin_popcount(_mm256_movemask_ps(reinterpret_cast<V>(m))); }
  using Base::truth;
  static Mask truth(const unsigned char* p) {
    __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return reinterpret_cast<Mask>(_mm256_cmpgt_epi32(_mm256_cvtepu8_epi32(bytes), _mm256_setzero_si256()));
  }
  static V select(Mask m, V a, V b) { return _mm256_blendv_ps(b, a, reinterpret_cast<V>(m)); }
};

template <>
struct Simd<double> : VectorType<double, int64_t, uint64_t, 52, 32> {
  using Base = VectorType<double, int64_t, uint64_t, 52, 32>;
  using Base::max;

  static V max(V a, V b) { return _mm256_max_pd(a, b); }
  static V select(Mask m, V a, V b) { return _mm256_blendv_pd(b, a, reinterpret_cast<V>(m)); }
};

#elif defined(__aarch64__)

// `+ - * /`, comparisons and select are NEON's as they are. The first n lanes are read and written without a call: one
// anywhere in a pass sends all of its parameters to the stack.

template <>
struct Simd<float> : VectorType<float, int32_t, uint32_t, 23, 16> {
  using Base = VectorType<float, int32_t, uint32_t, 23, 16>;
  using Base::load;
  using Base::max;
  using Base::store;

  MULTIMAX_INLINE static V load(const T* p, int n) {
    V a{};
    if (n > 0) a[0] = p[0];
    if (n > 1) a[1] = p[1];
    if (n > 2) a[2] = p[2];
    if (n > 3) a[3] = p[3];
    return a;
  }
  MULTIMAX_INLINE static void store(T* p, V a, int n) {
    if (n > 0) p[0] = a[0];
    if (n > 1) p[1] = a[1];
    if (n > 2) p[2] = a[2];
    if (n > 3) p[3] = a[3];
  }
  static bool any(Mask m) { return vmaxvq_u32(reinterpret_cast<uint32x4_t>(m)) != 0; }
  static bool all(Mask m) { return vminvq_u32(reinterpret_cast<uint32x4_t>(m)) != 0; }
  static int count(Mask m) { return -vaddvq_s32(m); }
  using Base::truth;
  static Mask truth(const unsigned char* p) {
    uint32_t bytes;
    __builtin_memcpy(&bytes, p, sizeof bytes);
    uint32x4_t lanes = vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(bytes))));
    return reinterpret_cast<Mask>(vtstq_u32(lanes, lanes));
  }
  static T sum(V a) { return vaddvq_f32(a); }
  static double wide_sum(V a) { return vaddvq_f64(vcvt_f64_f32(vget_low_f32(a)) + vcvt_high_f64_f32(a)); }
  static T max(V a) { return vmaxnmvq_f32(a); }
};

template <>
struct Simd<double> : VectorType<double, int64_t, uint64_t, 52, 16> {
  using Base = VectorType<double, int64_t, uint64_t, 52, 16>;
  using Base::load;
  using Base::max;
  using Base::store;

  MULTIMAX_INLINE static V load(const T* p, int n) {
    V a{};
    if (n > 0) a[0] = p[0];
    if (n > 1) a[1] = p[1];
    return a;
  }
  MULTIMAX_INLINE static void store(T* p, V a, int n) {
    if (n > 0) p[0] = a[0];
    if (n > 1) p[1] = a[1];
  }
  static T sum(V a) { return vaddvq_f64(a); }
  static double wide_sum(V a) { return sum(a); }
  static T max(V a) { return vmaxnmvq_f64(a); }
};

#else  // 16 bytes: SSE2, or whatever the machine has

template <>
struct Simd<float> : VectorType<float, int32_t, uint32_t, 23, 16> {
#if defined(__SSE2__)
  using Base = VectorType<float, int32_t, uint32_t, 23, 16>;
  using Base::max;
  static V max(V a, V b) { return _mm_max_ps(a, b); }
#endif
};

template <>
struct Simd<double> : VectorType<double, int64_t, uint64_t, 52, 16> {
#if defined(__SSE2__)
  using Base = VectorType<double, int64_t, uint64_t, 52, 16>;
  using Base::max;
  static V max(V a, V b) { return _mm_max_pd(a, b); }
  // spelled out because GCC 12 fails on its own comparison here with an internal error
  static Mask le(V a, V b) { return reinterpret_cast<Mask>(_mm_cmple_pd(a, b)); }
  static Mask lt(V a, V b) { return reinterpret_cast<Mask>(_mm_cmplt_pd(a, b)); }
  static Mask not_ge(V a, V b) { return reinterpret_cast<Mask>(_mm_cmpnge_pd(a, b)); }
#endif
};

#endif

}  // namespace multimax::MULTIMAX_ISA
