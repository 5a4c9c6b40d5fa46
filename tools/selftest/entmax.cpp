// The functions of the field: values and gradients, masks, NaN, tails and ties.
#include <numeric>

#include "check.h"

namespace selftest {
namespace {

using namespace multimax;

struct Case {
  Entmax kind;
  double option, parameter;  // parameter: any_alpha's alpha, softmax's temperature, 0 for none
  int64_t rows, length;
  bool masked, with_nan;

  std::string name() const {
    const char* kinds[] = {"sparsemax", "entmax15",  "entmax", "sparsehourglass",
                           "softmax",   "evsoftmax", "topk",   "topshare"};
    return std::string(kinds[static_cast<int>(kind)]) + " " + std::to_string(option) + " " + std::to_string(parameter) +
           ", (" + std::to_string(rows) + ", " + std::to_string(length) + ")" + (masked ? ", masked" : "") +
           (with_nan ? ", NaN" : "");
  }
  double alpha() const { return kind == Entmax::any_alpha ? parameter : kind == Entmax::entmax15 ? 1.5 : 2; }
};

using Numbers = std::vector<double>;

double sum_of(const Numbers& a) { return std::accumulate(a.begin(), a.end(), 0.0); }
double dot_of(const Numbers& a, const Numbers& b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0); }

// max(a z - tau, 0)^(1 / a) with a = alpha - 1 and the tau for which that sums to 1, by halving its interval.
Numbers entmax(const Numbers& z, double alpha) {
  const double a = alpha - 1, top = *std::max_element(z.begin(), z.end());
  double low = -1, high = 0;
  Numbers y(z.size());
  for (int step = 0; step < 60; ++step) {
    const double tau = (low + high) / 2;
    for (size_t i = 0; i < z.size(); ++i) y[i] = std::pow(std::max(a * (z[i] - top) - tau, 0.0), 1 / a);
    (sum_of(y) >= 1 ? low : high) = tau;
  }
  return y;
}

// One row of what takes part: weights, and the gradients of x and of the parameter.
struct Expected {
  const Case& c;
  const Numbers &x, &grad;
  Numbers y, dx;
  double d_parameter = 0, size = 0, d_parameter_size = 1e-30;  // sizes: of the terms

  Expected(const Case& c, const Numbers& x, const Numbers& grad) : c(c), x(x), grad(grad) {
    if (c.kind <= Entmax::sparsehourglass) {
      project();
    } else {
      exponentiate();
    }
    for (double a : dx) size = std::max(size, std::fabs(a));
  }

 private:
  void project() {
    const double alpha = c.alpha(), total = sum_of(x), count = static_cast<double>(x.size()), inverse = c.option;
    double factor = 1, slope = 0;
    if (c.kind == Entmax::sparsehourglass) {
      factor = (inverse + count) / (std::fabs(total) * inverse + count);
      slope = -factor * inverse * (total < 0 ? -1 : 1) / (std::fabs(total) * inverse + count);
    }
    Numbers z;
    for (double a : x) z.push_back(a * factor);
    y = entmax(z, alpha);
    Numbers w;
    for (double p : y) w.push_back(p > 0 ? std::pow(p, 2 - alpha) : 0);
    const double mean = dot_of(w, grad) / sum_of(w);
    for (size_t i = 0; i < x.size(); ++i) dx.push_back(w[i] * (grad[i] - mean));
    if (c.kind == Entmax::sparsehourglass) {
      const double more = slope * dot_of(dx, x);
      for (double& a : dx) a = a * factor + more;
    }
    for (size_t i = 0; i < x.size(); ++i) size = std::max(size, w[i] * (std::fabs(grad[i]) + std::fabs(mean)));
    if (c.kind != Entmax::any_alpha) return;
    // h: the weight's derivative by alpha, up to a multiple of w, which makes their sum 0
    Numbers h;
    const double a = alpha - 1, top = *std::max_element(x.begin(), x.end());
    for (size_t i = 0; i < x.size(); ++i) h.push_back(y[i] > 0 ? (w[i] * (x[i] - top) - y[i] * std::log(y[i])) / a : 0);
    const double shift = sum_of(h) / sum_of(w);
    for (size_t i = 0; i < x.size(); ++i) {
      d_parameter += grad[i] * (h[i] - shift * w[i]);
      d_parameter_size += std::fabs(grad[i]) * (y[i] / (a * a) + std::fabs(h[i]) + std::fabs(shift * w[i]));
    }
  }

  void exponentiate() {
    const double top = *std::max_element(x.begin(), x.end()), mean = sum_of(x) / static_cast<double>(x.size());
    const double temperature = c.kind == Entmax::softmax ? (c.parameter != 0 ? c.parameter : c.option) : 1;
    size_t kept = x.size();
    if (c.kind == Entmax::topk) kept = static_cast<size_t>(c.option);
    if (c.kind == Entmax::topshare) {
      kept = static_cast<size_t>(std::max(std::ceil(c.option * static_cast<double>(x.size()) - 1e-9), 1.0));
    }
    std::vector<size_t> order(x.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t i, size_t j) { return x[i] > x[j]; });
    y.assign(x.size(), 0);
    for (size_t i = 0; i < std::min(kept, x.size()); ++i) y[order[i]] = std::exp((x[order[i]] - top) / temperature);
    if (c.kind == Entmax::evsoftmax) {
      for (size_t i = 0; i < x.size(); ++i) y[i] *= x[i] >= mean ? 1 : c.option / (1 + c.option);
    }
    const double total = sum_of(y);
    for (double& p : y) p /= total;
    const double dot = dot_of(y, grad);
    for (size_t i = 0; i < x.size(); ++i) {
      dx.push_back(y[i] * (grad[i] - dot) / temperature);
      const double term = y[i] * (std::fabs(grad[i]) + std::fabs(dot)) / temperature;
      size = std::max(size, term);
      d_parameter -= dx.back() * (x[i] - top) / temperature;
      d_parameter_size += term * (top - x[i]) / temperature;
    }
  }
};

template <class N>
void test(const Case& c, const EntmaxKernels& kernels, Report& report, Random& random) {
  using C = ComputeType<typename N::Compute>;
  const int64_t all = c.rows * c.length, stats_size = stats_per_row[static_cast<int>(c.kind)];
  Buffer<N> x(all), grad(all), y(all), dx(all);
  Buffer<C> stats(c.rows * stats_size), parameter(c.rows), d_parameter(c.rows);
  x.normal(random, 1);
  grad.normal(random, 1);
  std::vector<unsigned char> takes_part(static_cast<size_t>(all), 1);
  std::vector<char> off(static_cast<size_t>(all), 0);
  for (int64_t i = 0; c.masked && i < all; ++i) {
    if (i / c.length != 1 && random.uniform() > 0.3) continue;  // the second row as a whole
    off[static_cast<size_t>(i)] = 1;
    if (random.uniform() < 0.5) {
      takes_part[static_cast<size_t>(i)] = 0;
    } else {
      x.set(i, random.uniform() < 0.5 ? -infinity : N::least);
    }
  }
  if (c.with_nan) {
    const int64_t at = random.below(c.length);
    x.set(at, nan);
    off[static_cast<size_t>(at)] = 0, takes_part[static_cast<size_t>(at)] = 1;
  }
  for (int64_t r = 0; r < c.rows; ++r) parameter.set(r, c.parameter);

  EntmaxJob job{};
  job.kind = c.kind;
  job.option = c.option;
  job.length = c.length;
  job.x = x.data();
  job.out = y.data();
  job.stats = stats.data();
  if (c.masked) {
    job.mask.data = takes_part.data();
    job.mask.axes = 1;
    job.mask.sizes[0] = c.rows;
    job.mask.strides[0] = c.length;
  }
  if (c.parameter != 0) job.parameter = parameter.data();
  const Scratch scratch(kernels.scratch_bytes(job));
  kernels.forward(job, 0, c.rows, scratch.get());
  job.grad = grad.data();
  if (c.kind >= Entmax::softmax && std::is_same_v<N, C>) job.y = y.data();
  job.out = dx.data();
  if (c.parameter != 0) job.grad_parameter = d_parameter.data();
  kernels.backward(job, 0, c.rows, scratch.get());

  Numbers values, gradients;
  double size = 1e-30;
  const double low_powers = c.alpha() > 2 ? 16 : 1;  // the weights' derivatives grow without bound at the edge
  for (int64_t r = 0; r < c.rows; ++r) {
    Numbers in, of;
    bool bad = false;
    for (int64_t i = r * c.length; i < (r + 1) * c.length; ++i) {
      if (off[static_cast<size_t>(i)]) continue;
      in.push_back(x[i]);
      of.push_back(grad[i]);
      bad |= x[i] != x[i];
    }
    double of_parameter = 0, of_parameter_size = 1;
    size_t next = 0;
    if (bad || in.empty()) {
      for (int64_t i = r * c.length; i < (r + 1) * c.length; ++i) {
        values.push_back(off[static_cast<size_t>(i)] ? 0 : nan);
        gradients.push_back(off[static_cast<size_t>(i)] ? 0 : nan);
      }
      of_parameter = bad ? nan : 0;
    } else {
      const Expected expected(c, in, of);
      size = std::max(size, expected.size);
      for (int64_t i = r * c.length; i < (r + 1) * c.length; ++i) {
        const bool there = !off[static_cast<size_t>(i)];
        values.push_back(there ? expected.y[next] : 0);
        gradients.push_back(there ? expected.dx[next++] : 0);
      }
      of_parameter = expected.d_parameter;
      of_parameter_size = expected.d_parameter_size;
    }
    if (c.parameter != 0) {
      report.number("gradient of the parameter", r, d_parameter[r], of_parameter, of_parameter_size,
                    tolerance<C>(256 * low_powers));
    }
  }
  report.numbers("y", y, values, 1, tolerance<N>(48));
  report.numbers("dx", dx, gradients, size, tolerance<N>(96 * low_powers));
}

}  // namespace

void test_entmax(const Set& set, Report& report) {
  each_type([&]<class N>(int dtype) {
    const EntmaxKernels* kernels = set.entmax[dtype];
    if (kernels == nullptr) return;
    Random random(3);
    for (int64_t length : {1, 2, 3, 5, 8, 13, 16, 17, 37, 100, 1000}) {
      const auto half = static_cast<double>((length + 1) / 2);
      const Case cases[] = {
          {Entmax::sparsemax, 0, 0, 6, length, false, false},
          {Entmax::entmax15, 0, 0, 6, length, false, false},
          {Entmax::any_alpha, 0, 1.125, 6, length, false, false},
          {Entmax::any_alpha, 0, 1.75, 6, length, false, false},
          {Entmax::any_alpha, 0, 2.5, 6, length, false, false},
          {Entmax::sparsehourglass, 0.5, 0, 6, length, false, false},
          {Entmax::softmax, 0.75, 0, 6, length, false, false},
          {Entmax::softmax, 1, 1.5, 6, length, false, false},
          {Entmax::evsoftmax, 0, 0, 6, length, false, false},
          {Entmax::evsoftmax, 0.25, 0, 6, length, false, false},
          {Entmax::topk, 3, 0, 6, length, false, false},
          {Entmax::topk, half, 0, 6, length, false, false},
          {Entmax::topshare, 0.3, 0, 6, length, false, false},
      };
      for (Case c : cases) {
        for (bool masked : {false, true}) {
          for (bool with_nan : {false, true}) {
            c.masked = masked, c.with_nan = with_nan;
            report.where = std::string(set.name) + " entmax " + N::name + ", " + c.name();
            test<N>(c, *kernels, report, random);
          }
        }
      }
    }
    report.line(std::string(set.name) + " entmax " + N::name);
  });
}

}  // namespace selftest
