// The row part of the loss: what the forward sums up, the gradients, and what is left out.
#include "check.h"

namespace selftest {
namespace {

using namespace multimax;

enum class Target { index, probabilities, wide_probabilities };

struct Case {
  int order;
  int64_t rows, classes;
  Target target;
  bool smoothing, weights, masked, with_nan, in_place;

  std::string name() const {
    const char* targets[] = {"index", "probabilities", "wide probabilities"};
    return std::string("order ") + std::to_string(order) + ", (" + std::to_string(rows) + ", " +
           std::to_string(classes) + "), " + targets[static_cast<int>(target)] + (smoothing ? ", smoothing" : "") +
           (weights ? ", weights" : "") + (masked ? ", masked" : "") + (with_nan ? ", NaN" : "");
  }
};

template <class N>
void test(const Case& c, const LossKernels& kernels, Report& report, Random& random) {
  using C = typename N::Compute;
  using Numbers = ComputeType<C>;
  const int64_t all = c.rows * c.classes, first_class = 3, ignore_index = -100;
  const bool index = c.target == Target::index;
  Buffer<N> x(all), probabilities(all), out(all);
  Buffer<Numbers> wide(all), weight(c.classes);
  Buffer<F64> stats(loss_planes * c.rows), scale(c.rows), p_scale(c.rows);
  x.normal(random, 2);
  std::vector<int64_t> target;
  std::vector<char> off(static_cast<size_t>(all), 0);
  for (int64_t r = 0; r < c.rows; ++r) {
    // within, left out, or in another part of the row
    target.push_back(r == 1 ? ignore_index : r == 2 ? 0 : first_class + random.below(c.classes));
    for (int64_t i = 0; i < c.classes; ++i) {
      probabilities.set(r * c.classes + i, random.uniform() / static_cast<double>(c.classes));
      wide.set(r * c.classes + i, random.uniform() / static_cast<double>(c.classes));
      if (c.masked && (r == 3 || random.uniform() < 0.3) && i + first_class != target.back()) {
        x.set(r * c.classes + i, random.uniform() < 0.5 ? -infinity : N::least);
        off[static_cast<size_t>(r * c.classes + i)] = 1;
      }
    }
    scale.set(r, random.normal());
    p_scale.set(r, random.normal());
  }
  for (int64_t i = 0; i < c.classes; ++i) weight.set(i, 0.5 + random.uniform());
  if (c.with_nan) {
    x.set(random.below(c.classes), nan);
    for (int64_t i = 0; i < c.classes; ++i) off[static_cast<size_t>(i)] = off[static_cast<size_t>(i)] && x[i] == x[i];
  }
  const Sigma sigma(c.order, random);
  std::vector<C> params;
  sigma.write(params);

  LossJob job{};
  job.order = c.order;
  job.rows = c.rows;
  job.classes = job.row_stride = job.probabilities_stride = job.out_stride = c.classes;
  job.x = x.data();
  job.params = params.data();
  job.target = index ? target.data() : nullptr;
  job.first_class = first_class;
  job.ignore_index = ignore_index;
  job.wide = c.target == Target::wide_probabilities || std::is_same_v<N, Numbers>;
  if (!index) job.probabilities = job.wide ? static_cast<const void*>(wide.data()) : probabilities.data();
  if (c.weights) job.weight = weight.data();
  job.uniform = c.smoothing ? 0.1 / static_cast<double>(c.classes) : 0;
  job.share = c.smoothing ? 0.9 : 1;
  job.full = true;
  job.stats = stats.data();
  job.scale = scale.data();
  job.p_scale = p_scale.data();
  std::vector<LossSums> of_parts(static_cast<size_t>(job.parts() > 1 ? job.rows * job.parts() : 0));
  job.of_parts = of_parts.data();
  const Scratch scratch(kernels.scratch_bytes(job));
  kernels.forward(job, 0, job.items(), scratch.get());
  if (job.parts() > 1) {
    for (int64_t r = 0; r < job.rows; ++r) job.join(r);
  }

  std::vector<double> original;
  for (int64_t i = 0; i < all; ++i) original.push_back(x[i]);
  Buffer<N>& gradient = c.in_place ? x : out;
  job.out = gradient.data();
  std::vector<double> sums(static_cast<size_t>(4 * c.order * job.items()));
  job.sums = sums.data();
  kernels.backward(job, 0, job.items(), scratch.get());

  std::vector<double> gradients(static_cast<size_t>(all));
  std::vector<double> expected_sums(static_cast<size_t>(4 * c.order)), sizes(expected_sums);
  double gradient_size = 1e-30;
  for (int64_t r = 0; r < c.rows; ++r) {
    const bool ignored = index && target[static_cast<size_t>(r)] == ignore_index;
    auto plane = [&](LossPlane which) { return stats[which * c.rows + r]; };
    if (ignored) {
      for (int j = 0; j < loss_planes; ++j) report.number("a row that is ignored", r, stats[j * c.rows + r], 0, 1, 0);
      continue;
    }
    const auto begin = static_cast<size_t>(r * c.classes);
    std::vector<double> s;
    for (size_t i = 0; i < static_cast<size_t>(c.classes); ++i) {
      s.push_back(off[begin + i] ? -infinity : sigma.value(original[begin + i]));
    }
    const Weights weights(s);
    const int64_t entry = index ? target[static_cast<size_t>(r)] - first_class : -1;
    double mass = 0, dot = 0, dot_size = 0, spread = 0, spread_size = 0, score = 0;
    int64_t best = -1;
    bool bad = false;
    for (int64_t i = 0; i < c.classes; ++i) {
      const auto at = static_cast<size_t>(i);
      const double given = index ? 0 : job.wide ? wide[r * c.classes + i] : probabilities[r * c.classes + i];
      const double q = (job.uniform + job.share * given) * (c.weights ? weight[i] : 1);
      const double wish = i == entry ? job.share * (c.weights ? weight[i] : 1) : 0;
      bad |= s[at] != s[at];
      if (i == entry) score = s[at];
      if (off[begin + at]) continue;
      if (best < 0 || s[at] > s[static_cast<size_t>(best)]) best = i;
      const double below = s[at] - weights.top, e = std::exp(below);
      mass += q;
      dot += q * below;
      dot_size += std::fabs(q) * (std::fabs(s[at]) + std::fabs(weights.top));
      spread += e * below;
      spread_size += e * (1 + std::fabs(s[at]) + std::fabs(weights.top));
      const double p = weights.p[at] * p_scale[r], slope = sigma.slope(original[begin + at]);
      const double ds = p - scale[r] * (q + wish), size = std::fabs(p) + std::fabs(scale[r]) * (q + wish);
      gradients[begin + at] = ds * slope;
      if (std::isfinite(size * slope)) gradient_size = std::max(gradient_size, std::fabs(size * slope));
      sigma.add(original[begin + at], ds, size, expected_sums.data(), sizes.data());
    }
    const double near = tolerance<Numbers>(48);
    if (bad) {
      report.number("total of NaN", r, plane(LossPlane::total), nan, 1, near);
    } else {
      report.number("top", r, plane(LossPlane::top), weights.top, std::max(std::fabs(weights.top), 1.0), near);
      report.number("total", r, plane(LossPlane::total), weights.total, std::max(weights.total, 1.0), near);
      report.number("mass", r, plane(LossPlane::mass), job.dense() ? mass : 0, std::max(mass, 1e-30), near);
      report.number("spread", r, plane(LossPlane::spread), spread, spread_size, near);
      report.number("dot", r, plane(LossPlane::dot), job.dense() ? dot : 0, dot_size, near);
      // any of those that are as large, to rounding
      const int64_t found = static_cast<int64_t>(plane(LossPlane::best)) - first_class;
      const bool there = best >= 0 && found >= 0 && found < c.classes;
      report.number("best", r, there ? s[static_cast<size_t>(found)] : plane(LossPlane::best), there ? weights.top : -1,
                    std::max(std::fabs(weights.top), 1.0), near);
    }
    if (entry >= 0) report.number("score", r, plane(LossPlane::score), score, std::max(std::fabs(score), 1.0), near);
  }
  report.numbers("gradient", gradient, gradients, gradient_size, tolerance<N>(64));
  for (size_t j = 0; j < expected_sums.size(); ++j) {
    double got = 0;
    for (size_t block = 0; block < sums.size(); block += expected_sums.size()) got += sums[block + j];
    report.number("sum", static_cast<int64_t>(j), got, expected_sums[j], sizes[j], tolerance<Numbers>(64));
  }
}

}  // namespace

void test_loss(const Set& set, Report& report) {
  each_type([&]<class N>(int dtype) {
    const LossKernels* kernels = set.loss[dtype];
    if (kernels == nullptr) return;
    Random random(2);
    auto run = [&](const Case& c) {
      report.where = std::string(set.name) + " loss " + N::name + ", " + c.name();
      test<N>(c, *kernels, report, random);
    };
    for (int order : {1, 2, 3}) {
      for (int64_t classes : {1, 2, 3, 5, 8, 17, 33, 100, 9001}) {
        for (Target target : {Target::index, Target::probabilities, Target::wide_probabilities}) {
          run({order, 5, classes, target, false, false, false, false, false});
          run({order, 5, classes, target, true, true, false, false, true});
        }
        run({order, 6, classes, Target::index, false, true, classes > 4, false, true});
        run({order, 6, classes, Target::index, false, false, classes > 4, true, false});
      }
    }
    report.line(std::string(set.name) + " loss " + N::name);
  });
}

}  // namespace selftest
