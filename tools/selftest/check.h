// What the self-test's parts share: the types of tensors, random numbers, memory with edges, comparison, parameters.
//
// The kernels' own conversions and arithmetic are not used here: expectations are computed in double from the numbers
// that the kernels are given.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <new>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "entmax/entmax.h"
#include "loss/loss.h"
#include "rows/rows.h"

namespace selftest {

using multimax::DType;

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

// The kernels of one instruction set; null where there are none.
struct Set {
  const char* name;
  const multimax::RowKernels* rows[4];
  const multimax::LossKernels* loss[4];
  const multimax::EntmaxKernels* entmax[4];
  const multimax::AttentionKernels* attention;
  bool pairs;  // attention rounds to bfloat16 on the way
};

// The types of tensors. `rounding` is the largest relative error of a number that is stored, `least` the lowest number.
struct F32 {
  using Entry = float;
  using Compute = float;
  static constexpr DType dtype = DType::f32;
  static constexpr const char* name = "f32";
  static constexpr double rounding = 0x1p-24, least = -0x1.fffffep127;
  static double get(Entry a) { return static_cast<double>(a); }
  static Entry put(double a) { return static_cast<float>(a); }
};

struct F64 {
  using Entry = double;
  using Compute = double;
  static constexpr DType dtype = DType::f64;
  static constexpr const char* name = "f64";
  static constexpr double rounding = 0x1p-53, least = -0x1.fffffffffffffp1023;
  static double get(Entry a) { return a; }
  static Entry put(double a) { return a; }
};

// A half type of so many bits of exponent and fraction, bit by bit.
template <int exponent_bits, int fraction_bits>
struct Half {
  using Entry = uint16_t;
  using Compute = float;
  static constexpr double rounding = 1.0 / (2 << fraction_bits);
  static constexpr int bias = (1 << (exponent_bits - 1)) - 1;
  static constexpr int special = (1 << exponent_bits) - 1;

  static double get(Entry a) {
    const int exponent = a >> fraction_bits & special, fraction = a & ((1 << fraction_bits) - 1);
    double size = exponent == 0 ? std::ldexp(fraction, 1 - bias - fraction_bits)
                                : std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
    if (exponent == special) size = fraction ? nan : infinity;
    return a >> 15 ? -size : size;
  }
  static Entry put(double a) {
    const int sign = std::signbit(a) ? 0x8000 : 0;
    a = std::fabs(a);
    if (a != a) return static_cast<Entry>(special << fraction_bits | 1 << (fraction_bits - 1));
    int exponent = a == 0 ? 1 - bias : std::max(std::ilogb(a), 1 - bias);
    if (a == infinity || exponent > bias) return static_cast<Entry>(sign | special << fraction_bits);
    // carries from the fraction into the exponent, as it should
    const int units = static_cast<int>(std::nearbyint(std::ldexp(a, fraction_bits - exponent)));
    return static_cast<Entry>(sign | (((exponent + bias - 1) << fraction_bits) + units));
  }
};

struct BF16 : Half<8, 7> {
  static constexpr DType dtype = DType::bf16;
  static constexpr const char* name = "bf16";
  static constexpr double least = -0x1.fep127;
};

struct F16 : Half<5, 10> {
  static constexpr DType dtype = DType::f16;
  static constexpr const char* name = "f16";
  static constexpr double least = -65504;
};

// How far results may be off: what storing them costs, and some steps of the compute type. In double the expectation is
// no better than the result.
template <class N>
double tolerance(double steps) {
  const double step = std::is_same_v<typename N::Compute, double> ? 4 * 0x1p-53 : 0x1p-24;
  return (N::rounding > step ? N::rounding * 1.01 : 0) + steps * step;
}

// Random numbers, the same everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  double normal() {
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
  }

 private:
  uint64_t state_;
};

// A tensor's memory. Before and behind it are NaN, which must not reach results, and must still be there afterwards.
template <class N>
class Buffer {
 public:
  using Entry = typename N::Entry;

  explicit Buffer(int64_t n) : n_(n), memory_(static_cast<size_t>(n + 2 * edge), N::put(nan)) {}
  int64_t size() const { return n_; }
  Entry* data() { return memory_.data() + edge; }
  double operator[](int64_t i) const { return N::get(memory_[static_cast<size_t>(i + edge)]); }
  void set(int64_t i, double a) { memory_[static_cast<size_t>(i + edge)] = N::put(a); }
  void normal(Random& random, double scale) {
    for (int64_t i = 0; i < n_; ++i) set(i, scale * random.normal());
  }
  bool edges_are_whole() const {
    const Entry edge_of = N::put(nan);
    auto whole = [&](size_t i) { return std::memcmp(&memory_[i], &edge_of, sizeof edge_of) == 0; };
    for (size_t i = 0; i < edge; ++i) {
      if (!whole(i) || !whole(memory_.size() - 1 - i)) return false;
    }
    return true;
  }

 private:
  static constexpr int64_t edge = 40;
  int64_t n_;
  std::vector<Entry> memory_;
};

template <class C>
using ComputeType = std::conditional_t<std::is_same_v<C, double>, F64, F32>;

class Scratch {
 public:
  explicit Scratch(int64_t bytes) : memory_(::operator new(static_cast<size_t>(bytes + 64), std::align_val_t{64})) {}
  ~Scratch() { ::operator delete(memory_, std::align_val_t{64}); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* get() const { return memory_; }

 private:
  void* memory_;
};

// Compares, counts, and says where something is wrong.
class Report {
 public:
  std::string where;  // what is being tested

  // `size`: of the numbers that went into the result; tolerances are parts of it.
  void number(const char* what, int64_t which, double got, double expected, double size, double tolerance) {
    ++numbers_;
    if (got == expected || (got != got && expected != expected)) return;
    const double error = std::fabs(got - expected) / (tolerance * size);
    if (error <= 1) {
      worst_ = std::max(worst_, error);
    } else {
      fail(std::string(what) + " " + std::to_string(which), got, expected, tolerance * size);
    }
  }
  template <class N>
  void numbers(const char* what, const Buffer<N>& got, const std::vector<double>& expected, double size,
               double tolerance) {
    for (int64_t i = 0; i < got.size(); ++i) {
      number(what, i, got[i], expected[static_cast<size_t>(i)], size, tolerance);
    }
    if (!got.edges_are_whole()) fail(std::string(what) + " was written past its end", 0, 0, 0);
  }
  // Prints a line on what was tested since the last one.
  void line(const std::string& what) {
    std::printf("%-28s %9lld numbers, largest error %.2f of what is allowed\n", what.c_str(),
                static_cast<long long>(numbers_), worst_);
    all_ += numbers_;
    numbers_ = 0;
    worst_ = 0;
  }
  int64_t failures() const { return failures_; }
  int64_t all() const { return all_; }

 private:
  int64_t numbers_ = 0, all_ = 0, failures_ = 0;
  double worst_ = 0;

  void fail(const std::string& what, double got, double expected, double allowed) {
    if (++failures_ <= 20) {
      std::printf("FAILED %s, %s: got %.9g, expected %.9g within %.2g\n", where.c_str(), what.c_str(), got, expected,
                  allowed);
    }
  }
};

inline double largest(const std::vector<double>& a) {
  double size = 0;
  for (double x : a) size = std::max(size, std::isfinite(x) ? std::fabs(x) : 0);
  return size;
}

// One set of parameters, and sigma in double.
struct Sigma {
  int order;
  std::vector<double> c, e, b, d;

  Sigma(int order, Random& random) : order(order) {
    for (int n = 0; n < order; ++n) {
      const double scale = std::pow(0.4, n + 1);
      // as exact in float as in double
      for (auto [to, a] : {std::pair{&c, -scale * random.uniform()}, std::pair{&e, -scale * random.uniform()},
                           std::pair{&b, -0.2 - random.uniform()}, std::pair{&d, 0.2 + random.uniform()}}) {
        to->push_back(static_cast<double>(static_cast<float>(a)));
      }
    }
  }
  double value(double x) const {
    double s = x;
    for (int n = 0; n < order; ++n) {
      s += at(c, n) * std::pow(std::max(at(b, n) - x, 0.0), n + 1);
      s += at(e, n) * std::pow(std::max(x - at(d, n), 0.0), n + 1);
    }
    return s;
  }
  // NaN is on both sides of every knot: it is not to be lost
  double slope(double x) const {
    double s = 1;
    for (int n = 0; n < order; ++n) {
      if (!(x >= at(b, n))) s -= (n + 1) * at(c, n) * std::pow(at(b, n) - x, n);
      if (!(x <= at(d, n))) s += (n + 1) * at(e, n) * std::pow(x - at(d, n), n);
    }
    return s;
  }
  // The sums behind the parameters' gradients, 4 for each order, and the sizes of what they are of.
  void add(double x, double ds, double size, double* sums, double* sizes) const {
    for (int n = 0; n < order; ++n) {
      const double u = std::max(at(b, n) - x, 0.0), v = std::max(x - at(d, n), 0.0);
      const double powers[] = {std::pow(u, n + 1), u == 0 ? 0 : std::pow(u, n), std::pow(v, n + 1),
                               v == 0 ? 0 : std::pow(v, n)};
      for (int j = 0; j < 4; ++j) {
        sums[4 * n + j] += ds * powers[j];
        sizes[4 * n + j] += size * powers[j];
      }
    }
  }
  template <class C>
  void write(std::vector<C>& to) const {
    for (const std::vector<double>* from : {&c, &e, &b, &d}) {
      for (double a : *from) to.push_back(static_cast<C>(a));
    }
  }

 private:
  static double at(const std::vector<double>& a, int n) { return a[static_cast<size_t>(n)]; }
};

// Softmax of scores, -inf where masked: weights, and log-sum. A row that is masked as a whole has weights of 0.
struct Weights {
  std::vector<double> p;
  double top = -infinity, total = 0;

  explicit Weights(const std::vector<double>& s) : p(s.size()) {
    bool bad = false;
    for (double a : s) {
      top = std::max(top, a);
      bad |= a != a;
    }
    for (size_t i = 0; i < s.size(); ++i) {
      p[i] = s[i] == -infinity ? 0 : bad ? nan : std::exp(s[i] - top);
      total += p[i];
    }
    if (total != 0) {
      for (double& a : p) a = a == 0 ? 0 : a / total;
    }
  }
};

void test_rows(const Set& set, Report& report);
void test_loss(const Set& set, Report& report);
void test_entmax(const Set& set, Report& report);
void test_attention(const Set& set, Report& report);

// Calls f with each type whose kernels are there.
template <class F>
void each_type(F f) {
  f.template operator()<F32>(0);
  f.template operator()<F64>(1);
  f.template operator()<BF16>(2);
  f.template operator()<F16>(3);
}

}  // namespace selftest
