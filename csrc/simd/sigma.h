// The arithmetic of MultiMax on vectors: exp, sigma, its slope, and the sums behind the parameters' gradients.
#pragma once

#include "simd/simd.h"

namespace multimax::MULTIMAX_ISA {

// exp(r) = 1 + r q(r) for |r| <= ln 2 / 2, q a Chebyshev fit, highest power first; ln 2 in two parts, of which the
// first has so few bits that its multiples are exact.
template <class T>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  static constexpr float q[] = {1.39337307157920825e-3f, 8.36922029180360742e-3f, 4.16664641974056923e-2f,
                                1.66665046130326106e-1f, 5.00000001353872989e-1f, 1.0f};
  static constexpr float log2_e = 1.44269504f, ln2_high = 0x1.62ep-1f, ln2_low = 3.19461849453e-5f;
  static constexpr float lowest = -87.336544f;  // ln of the smallest normal number
};

template <>
struct ExpConstants<double> {
  static constexpr double q[] = {2.09182123191339782e-9,
                                 2.51101536469289314e-8,
                                 2.75572630773094115e-7,
                                 2.75572406046638958e-6,
                                 2.4801587336630947e-5,
                                 1.98412698903406653e-4,
                                 1.38888888888790031e-3,
                                 8.33333333331949032e-3,
                                 4.16666666666666769e-2,
                                 1.66666666666666809e-1,
                                 0.5,
                                 1.0};
  static constexpr double log2_e = 1.4426950408889634, ln2_high = 0x1.62e42fefa3p-1, ln2_low = 2.8235290563031577e-13;
  static constexpr double lowest = -708.39641853226408;
};

// exp(x) for x <= 0, to about one unit in the last place; exactly 0 below the smallest normal number, NaN for NaN.
// x = n ln 2 + r with n whole: exp(x) = 2^n exp(r). Adding 1.5 * 2^fraction_bits rounds to a whole number and leaves it
// in the low bits, from where it is moved to the exponent of 2^n.
template <class S>
MULTIMAX_INLINE typename S::V exp(typename S::V x) {
  using T = typename S::T;
  using V = typename S::V;
  using E = ExpConstants<T>;
  constexpr T rounder = static_cast<T>(int64_t{3} << (S::fraction_bits - 1));
  V shifted = x * E::log2_e + rounder;
  V n = shifted - rounder;
  V r = (x - n * E::ln2_high) - n * E::ln2_low;
  V q = S::set(E::q[0]);
  for (unsigned i = 1; i < sizeof(E::q) / sizeof(T); ++i) q = q * r + E::q[i];
  V power = r * q + static_cast<T>(1);
  // as a factor, not added to the exponent: a NaN must stay one, whatever its other bits
  using U = typename S::U;
  V scale = reinterpret_cast<V>((reinterpret_cast<U>(shifted) << S::fraction_bits) +
                                reinterpret_cast<U>(S::set(static_cast<T>(1))));
  return S::zero_if(S::lt(x, S::set(E::lowest)), power * scale);
}

#if defined(__AVX512F__)
// The same in steps of ln 2 / 16, with 2^(j/16) from a register: a polynomial half as long.
template <>
MULTIMAX_INLINE __m512 exp<Simd<float>>(__m512 x) {
  using E = ExpConstants<float>;
  // bits of 2^(j/16) less j << 19, so that adding the shifted sixteenths gives the whole power
  const __m512i table = _mm512_sub_epi32(
      _mm512_castps_si512(_mm512_setr_ps(1.0f, 1.044273782f, 1.090507733f, 1.138788635f, 1.189207115f, 1.241857812f,
                                         1.296839555f, 1.354255547f, 1.414213562f, 1.476826146f, 1.542210825f,
                                         1.610490332f, 1.681792831f, 1.756252160f, 1.834008086f, 1.915206561f)),
      _mm512_slli_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 19));
  constexpr float rounder = 0x1.8p19f;
  __m512 shifted = x * E::log2_e + rounder;
  __m512 n = shifted - rounder;
  __m512 r = (x - n * E::ln2_high) - n * E::ln2_low;
  __m512i bits = _mm512_castps_si512(shifted);
  __m512 power =
      _mm512_castsi512_ps(_mm512_add_epi32(_mm512_permutexvar_epi32(bits, table), _mm512_slli_epi32(bits, 19)));
  __m512 q = (r * 1.66669605011649512e-1f + 5.00014691774250291e-1f) * r + 1.0f;
  return _mm512_maskz_fmadd_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(E::lowest), _CMP_NLT_UQ), power * r, q, power);
}
#endif

// log r + lost for normal r > 0, to about one unit in the last place. r = m 2^e with m next to 1, and
// log m = 2 (s + s^3 / 3 + s^5 / 5 + ...) with s = (m - 1) / (m + 1).
template <class S>
MULTIMAX_INLINE typename S::V log(typename S::V r, typename S::V lost = typename S::V{}) {
  using T = typename S::T;
  using V = typename S::V;
  using I = typename S::I;
  using E = ExpConstants<T>;
  const V one = S::set(1);
  const I root_half = reinterpret_cast<I>(S::set(static_cast<T>(0.70710678118654752)));
  I e = (reinterpret_cast<I>(r) - root_half) >> S::fraction_bits;
  V m = reinterpret_cast<V>(reinterpret_cast<I>(r) - (e << S::fraction_bits));
  V s = (m - one) / (m + one), z = s * s;
  constexpr int terms = S::fraction_bits > 30 ? 11 : 5;
  V q = S::set(static_cast<T>(1) / static_cast<T>(2 * terms + 1));
  for (int n = terms - 1; n > 0; --n) q = q * z + static_cast<T>(1) / static_cast<T>(2 * n + 1);
  V n = __builtin_convertvector(e, V);
  V high = n * E::ln2_high, twice = s + s;
  return high + (twice + (n * E::ln2_low + lost + twice * z * q));
}

// log(1 + y) for y in (-1, 0]: what rounding took from 1 + y is put back.
template <class S>
MULTIMAX_INLINE typename S::V log1p(typename S::V y) {
  const typename S::V one = S::set(1), r = one + y;
  return log<S>(r, (y - (r - one)) / r);
}

// One set of parameters: lower and upper coefs, lower and upper knots, (order) each.
template <class T>
struct Params {
  int order;
  const T *c, *e, *b, *d;
};

// Parameters as vectors: for N = 1 and 2 in registers, for N = 0, any order, read from memory.
template <class S, int N>
struct Vectors {
  using V = typename S::V;

  V c_[N], e_[N], b_[N], d_[N];

  explicit Vectors(const Params<typename S::T>& p) {
    for (int n = 0; n < N; ++n) {
      c_[n] = S::set(p.c[n]);
      e_[n] = S::set(p.e[n]);
      b_[n] = S::set(p.b[n]);
      d_[n] = S::set(p.d[n]);
    }
  }
  static constexpr int order() { return N; }
  V c(int n) const { return c_[n]; }
  V e(int n) const { return e_[n]; }
  V b(int n) const { return b_[n]; }
  V d(int n) const { return d_[n]; }
};

template <class S>
struct Vectors<S, 0> {
  using V = typename S::V;

  Params<typename S::T> p;

  explicit Vectors(const Params<typename S::T>& p) : p(p) {}
  int order() const { return p.order; }
  V c(int n) const { return S::set(p.c[n]); }
  V e(int n) const { return S::set(p.e[n]); }
  V b(int n) const { return S::set(p.b[n]); }
  V d(int n) const { return S::set(p.d[n]); }
};

// Calls f with the N that an order has.
template <class F>
MULTIMAX_INLINE auto with_order(int order, F f) {
  if (order == 1) return f.template operator()<1>();
  if (order == 2) return f.template operator()<2>();
  return f.template operator()<0>();
}

// sigma(x), equation 6. Each term is multiplied out from its coefficient, (c u) u, never c (u^2): where the square
// would overflow, a zero coefficient still gives zero, so zero coefs are softmax for every finite input.
template <class S, int N>
MULTIMAX_INLINE typename S::V sigma(const Vectors<S, N>& f, typename S::V x) {
  using V = typename S::V;
  const V zero{};
  V s = x;
  for (int n = 0; n < f.order(); ++n) {
    V u = S::max(zero, f.b(n) - x), v = S::max(zero, x - f.d(n));
    V cu = f.c(n), ev = f.e(n);
    for (int i = 0; i < n; ++i) {
      cu = cu * u;
      ev = ev * v;
    }
    s = s + cu * u;
    s = s + ev * v;
  }
  return s;
}

// The gradient ds of sigma(x), taken on to x (returned) and, WithParams, to the parameters (added to the sums).
// sums[4 (n - 1) ..]: ds u^n and ds u^(n-1) [x < b] of the lower term, ds v^n and ds v^(n-1) [x > d] of the upper
// one; factors that do not depend on x are applied when the sums are complete.
// f holds the slope's coefficients, n c and n e instead of c and e. Where ds is 0, an entry adds nothing to anything,
// whatever its powers and its slope overflow to.
template <bool WithParams, class S, int N>
MULTIMAX_INLINE typename S::V sigma_backward(const Vectors<S, N>& f, typename S::V x, typename S::V ds,
                                             typename S::V* sums) {
  using V = typename S::V;
  const V zero{};
  const auto nothing = S::eq(ds, zero);
  // Where arithmetic under a mask is free, the sums are masked: x, zeroed, would wait for ds, and so would all that
  // follows from it, which made the loop a sixth slower on Zen 4.
  if constexpr (!S::masks_arithmetic) x = S::zero_if(nothing, x);
  auto product = [&](V a, V b) { return S::masks_arithmetic ? S::zero_if(nothing, a * b) : a * b; };
  auto add_product = [&](V& sum, V a, V b) {
    if constexpr (S::masks_arithmetic) {
      sum = S::add_product_unless(nothing, sum, a, b);
    } else {
      sum = sum + a * b;
    }
  };
  // order 1: the slope is a step, 0 at the knot itself (the paper's subgradient there is 1)
  auto below = S::not_ge(x, f.b(0)), above = S::not_ge(f.d(0), x);  // NaN is both, as it is not to be lost
  const V one = S::set(1);
  V slope = S::add_where(above, S::select(below, one - f.c(0), one), f.e(0));
  if constexpr (WithParams) {
    add_product(sums[0], ds, S::sub_where(below, f.b(0), x));
    sums[1] = S::add_where(below, sums[1], ds);
    add_product(sums[2], ds, S::sub_where(above, x, f.d(0)));
    sums[3] = S::add_where(above, sums[3], ds);
  }
  for (int n = 1; n < f.order(); ++n) {
    V u = S::max(zero, f.b(n) - x), v = S::max(zero, x - f.d(n));
    V cu = f.c(n) * u, ev = f.e(n) * v, du = product(ds, u), dv = product(ds, v);
    for (int i = 1; i < n; ++i) {
      cu = cu * u;
      ev = ev * v;
      du = product(du, u);
      dv = product(dv, v);
    }
    slope = (slope - cu) + ev;
    if constexpr (WithParams) {
      V* sum = sums + 4 * n;
      add_product(sum[0], du, u);
      sum[1] = sum[1] + du;
      add_product(sum[2], dv, v);
      sum[3] = sum[3] + dv;
    }
  }
  return S::zero_if(nothing, ds * slope);
}

}  // namespace multimax::MULTIMAX_ISA
