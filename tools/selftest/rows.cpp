// The row functions: values, gradients, masks, NaN, tails, rows in columns and rows that lie apart.
#include "check.h"

namespace selftest {
namespace {

using namespace multimax;

enum class Layout { side_by_side, columns, apart, short_rows };  // the last: side by side, and taken as columns
enum class Masking { none, boolean, by_value };

struct Case {
  Kind kind;
  int order;
  int64_t rows, length;
  Layout layout;
  Masking masking;
  bool with_nan, own_parameters;  // each row its own

  bool in_lanes() const { return layout == Layout::columns || layout == Layout::short_rows; }
  std::string name() const {
    const char* kinds[] = {"multimax", "log_multimax", "modulate"};
    const char* layouts[] = {"", ", columns", ", apart", ", as columns"};
    const char* maskings[] = {"", ", mask", ", masked by value"};
    return std::string(kinds[static_cast<int>(kind)]) + " of order " + std::to_string(order) + ", (" +
           std::to_string(rows) + ", " + std::to_string(length) + ")" + layouts[static_cast<int>(layout)] +
           maskings[static_cast<int>(masking)] + (with_nan ? ", NaN" : "") + (own_parameters ? ", own parameters" : "");
  }
};

// Where entry i of row r lies.
struct Places {
  const Case& c;
  int64_t step() const { return c.layout == Layout::columns ? c.rows : c.layout == Layout::apart ? 2 : 1; }
  int64_t row() const { return c.layout == Layout::columns ? 1 : c.length * step(); }
  int64_t of(int64_t r, int64_t i) const { return r * row() + i * step(); }
  int64_t size() const { return c.rows * c.length * (c.layout == Layout::apart ? 2 : 1); }
  template <class Entry>
  Operand operand(Entry* data) const {
    Operand operand;
    operand.data = data;
    operand.length_stride = step();
    (c.in_lanes() ? operand.lane_stride : operand.strides[0]) = row();
    return operand;
  }
};

template <class N>
struct Test {
  using C = typename N::Compute;
  using Numbers = ComputeType<C>;
  const Case& c;
  const RowKernels& kernels;
  Report& report;

  void run(Random& random) {
    const Places at{c};
    const auto all = static_cast<size_t>(at.size());
    Buffer<N> x(at.size()), y(at.size()), grad(at.size()), dx(at.size());
    x.normal(random, 2);
    grad.normal(random, 1);
    std::vector<unsigned char> takes_part(all, 1);
    std::vector<char> off(all, 0);
    for (int64_t r = 0; r < c.rows; ++r) {
      for (int64_t i = 0; i < c.length; ++i) {
        const int64_t place = at.of(r, i);
        // the second row as a whole
        const bool masked = c.masking != Masking::none && (r == 1 || random.uniform() < 0.3);
        if (!masked) continue;
        off[static_cast<size_t>(place)] = 1;
        if (c.masking == Masking::boolean) takes_part[static_cast<size_t>(place)] = 0;
        if (c.masking == Masking::by_value) x.set(place, random.uniform() < 0.5 ? -infinity : N::least);
      }
    }
    if (c.with_nan) {
      const int64_t place = at.of(0, random.below(c.length));
      x.set(place, nan);
      off[static_cast<size_t>(place)] = 0, takes_part[static_cast<size_t>(place)] = 1;
    }
    std::vector<Sigma> sigmas;
    std::vector<C> params;
    for (int64_t r = 0; r < (c.own_parameters ? c.rows : 1); ++r) {
      sigmas.emplace_back(c.order, random);
      sigmas.back().write(params);
    }

    RowJob job{};
    job.kind = c.kind;
    job.order = c.order;
    job.length = c.length;
    job.columns = c.in_lanes();
    job.lanes = job.columns ? c.rows : 1;
    job.axes = job.columns ? 0 : 1;
    job.sizes[0] = c.rows;
    job.x = at.operand(x.data());
    job.out = at.operand(y.data());
    if (c.masking == Masking::boolean) job.mask = at.operand(takes_part.data());
    Buffer<Numbers> stats(2 * c.rows);
    if (!std::is_same_v<N, Numbers> && c.kind != Kind::modulate) {
      job.stats.data = stats.data();
      (job.columns ? job.stats.lane_stride : job.stats.strides[0]) = 1;
      job.stats_plane = c.rows;
    }
    job.params = params.data();
    job.set_strides[0] = c.own_parameters;
    job.items = job.columns ? (c.rows + kernels.width - 1) / kernels.width : c.rows;
    job.run_items = c.own_parameters ? 1 : job.items;
    divide(job, kernels);
    call(kernels.forward, job);

    job.y = c.kind == Kind::modulate || job.stats.data != nullptr ? Operand{} : at.operand(y.data());
    job.grad = at.operand(grad.data());
    job.out = at.operand(dx.data());
    std::vector<double> sums(static_cast<size_t>(job.blocks() * 4 * c.order));
    job.sums = sums.data();
    call(kernels.backward, job);
    compare(at, x, grad, off, sigmas, y, dx, job, sums);
    // and without the parameters' gradients
    job.sums = nullptr;
    Buffer<N> again(at.size());
    job.out = at.operand(again.data());
    call(kernels.backward, job);
    std::vector<double> same;
    for (int64_t i = 0; i < at.size(); ++i) same.push_back(dx[i]);
    report.numbers("dx without sums", again, same, std::max(largest(same), 1e-30), tolerance<N>(4));
  }

 private:
  void call(const RowPass& pass, RowJob& job) const {
    const Scratch scratch(kernels.scratch_bytes(job));
    if (job.stretches == 1) return pass.whole(job, 0, job.blocks(), scratch.get());
    const Scratch of_blocks(job.blocks() * kernels.block_bytes), of_items(job.items * kernels.item_bytes);
    job.of_blocks = of_blocks.get();
    job.of_items = of_items.get();
    pass.measure(job, 0, job.blocks(), scratch.get());
    pass.join(job, 0, job.items);
    pass.finish(job, 0, job.blocks(), scratch.get());
  }

  void compare(const Places& at, const Buffer<N>& x, const Buffer<N>& grad, const std::vector<char>& off,
               const std::vector<Sigma>& sigmas, const Buffer<N>& y, const Buffer<N>& dx, const RowJob& job,
               const std::vector<double>& got_sums) {
    std::vector<double> values(off.size(), nan), gradients(off.size(), nan);
    const size_t sets = sigmas.size(), each = static_cast<size_t>(4 * c.order);
    std::vector<double> sums(sets * each), sizes(sets * each);
    double value_size = 1e-30, gradient_size = 1e-30;
    for (int64_t r = 0; r < c.rows; ++r) {
      const size_t which = c.own_parameters ? static_cast<size_t>(r) : 0;
      const Sigma& sigma = sigmas[which];
      std::vector<double> s;
      for (int64_t i = 0; i < c.length; ++i) {
        s.push_back(off[static_cast<size_t>(at.of(r, i))] ? -infinity : sigma.value(x[at.of(r, i)]));
      }
      const Weights weights(s);
      double dot = 0, dot_size = 0;  // multimax: sum of grad p; log_multimax: sum of grad
      for (int64_t i = 0; i < c.length; ++i) {
        if (off[static_cast<size_t>(at.of(r, i))]) continue;
        const double term = grad[at.of(r, i)] * (c.kind == Kind::multimax ? weights.p[static_cast<size_t>(i)] : 1);
        dot += term;
        dot_size += std::fabs(term);
      }
      for (int64_t i = 0; i < c.length; ++i) {
        const auto place = static_cast<size_t>(at.of(r, i));
        const double g = grad[at.of(r, i)], p = weights.p[static_cast<size_t>(i)], a = x[at.of(r, i)];
        const double score = s[static_cast<size_t>(i)];
        if (off[place]) {
          values[place] = c.kind == Kind::multimax        ? 0
                          : c.kind == Kind::log_multimax  ? -infinity
                          : c.masking == Masking::boolean ? -infinity
                                                          : a;
          gradients[place] = 0;
          continue;
        }
        double ds = g, size = std::fabs(g);
        values[place] = score;
        if (c.kind == Kind::multimax) {
          values[place] = p;
          ds = p * (g - dot);
          size = p * (std::fabs(g) + dot_size);
        } else if (c.kind == Kind::log_multimax) {
          values[place] = score - weights.top - std::log(weights.total);
          ds = g - p * dot;
          size += p * dot_size;
        }
        const double slope = sigma.slope(a);
        gradients[place] = ds * slope;
        if (std::isfinite(values[place])) value_size = std::max(value_size, std::fabs(values[place]));
        if (std::isfinite(size * slope)) gradient_size = std::max(gradient_size, std::fabs(size * slope));
        sigma.add(a, ds, size, &sums[which * each], &sizes[which * each]);
      }
    }
    if (c.layout == Layout::apart) {  // nothing between the entries may change
      for (size_t i = 1; i < off.size(); i += 2) values[i] = gradients[i] = nan;
    }
    report.numbers("y", y, values, value_size, tolerance<N>(48));
    report.numbers("dx", dx, gradients, gradient_size, tolerance<N>(64));
    std::vector<double> got(sums.size());
    for (int64_t block = 0; block < job.blocks(); ++block) {
      for (size_t j = 0; j < each; ++j) {
        got[(sets > 1 ? static_cast<size_t>(block / job.run_blocks) * each : 0) + j] +=
            got_sums[static_cast<size_t>(block) * each + j];
      }
    }
    for (size_t j = 0; j < sums.size(); ++j) {
      report.number("sum", static_cast<int64_t>(j), got[j], sums[j], sizes[j], tolerance<Numbers>(64));
    }
  }
};

}  // namespace

void test_rows(const Set& set, Report& report) {
  each_type([&]<class N>(int dtype) {
    const RowKernels* kernels = set.rows[dtype];
    if (kernels == nullptr) return;
    Random random(1);
    auto test = [&](const Case& c) {
      report.where = std::string(set.name) + " rows " + N::name + ", " + c.name();
      Test<N>{c, *kernels, report}.run(random);
    };
    for (Kind kind : {Kind::multimax, Kind::log_multimax, Kind::modulate}) {
      for (int order : {1, 2, 3}) {
        for (int64_t length : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 1000, 4500, 17000}) {
          test({kind, order, 5, length, Layout::side_by_side, Masking::none, false, false});
        }
        for (int64_t length : {6, 19, 130, 4500}) {
          for (Masking masking : {Masking::boolean, Masking::by_value}) {
            test({kind, order, 7, length, Layout::side_by_side, masking, false, false});
            test({kind, order, 7, length, Layout::side_by_side, masking, true, false});
          }
          test({kind, order, 7, length, Layout::apart, Masking::boolean, false, false});
          test({kind, order, 4, length, Layout::side_by_side, Masking::none, true, true});
        }
        for (int64_t lanes : {1, 3, 4, 13, 16, 35}) {
          test({kind, order, lanes, 21, Layout::columns, Masking::none, false, false});
          test({kind, order, lanes, 300, Layout::columns, Masking::boolean, false, false});
          test({kind, order, lanes, 700, Layout::columns, Masking::by_value, false, false});
          for (int64_t length : {2, 15, 16, 17, 32, 33, 48, 96}) {
            test({kind, order, lanes, length, Layout::short_rows, Masking::boolean, false, false});
          }
          test({kind, order, lanes, 9, Layout::columns, Masking::by_value, lanes > 2, false});
        }
      }
    }
    report.line(std::string(set.name) + " rows " + N::name);
  });
}

}  // namespace selftest
