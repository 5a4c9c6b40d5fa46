// Attention: values, log-sums and all gradients, with masks, biases, bands, dropout, NaN and packed sequences.
#include "attention/plan.h"
#include "check.h"

namespace selftest {
namespace {

using namespace multimax;

enum class Masking { none, boolean, numbers };

struct Case {
  int order;
  int64_t batches, heads, group, queries, keys, width, value_width;
  Masking masking = Masking::none;
  bool causal = false, bias = false, dropout = false, own_parameters = false, with_nan = false, packed = false;
  int64_t left = -1, right = -1;

  std::string name() const {
    std::string text = "order " + std::to_string(order) + ", (";
    for (int64_t n : {batches, heads, group, queries, keys, width, value_width}) text += std::to_string(n) + " ";
    text.back() = ')';
    if (masking != Masking::none) text += masking == Masking::boolean ? ", mask" : ", mask of numbers";
    for (auto [on, what] : {std::pair{causal, "causal"},
                            {bias, "bias"},
                            {dropout, "dropout"},
                            {with_nan, "NaN"},
                            {own_parameters, "own parameters"},
                            {packed, "packed"},
                            {left >= 0, "window"}}) {
      if (on) text += std::string(", ") + what;
    }
    return text;
  }
};

// What dropout multiplies a weight with: see DropoutRow in csrc/attention/tile.h, which works on vectors.
double kept(const Dropout& dropout, int64_t head, int64_t query, int64_t key) {
  if (!dropout.on) return 1;
  auto mix = [](uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  };
  uint64_t row = mix(dropout.seed + 0x9e3779b97f4a7c15u * (static_cast<uint64_t>(head) + 1));
  row = mix(row + 0x9e3779b97f4a7c15u * (static_cast<uint64_t>(query) + 1));
  uint32_t z = static_cast<uint32_t>(key) * 0x9e3779b1u ^ static_cast<uint32_t>(row);
  z = (z ^ (z >> 16)) * 0x85ebca6bu + static_cast<uint32_t>(row >> 32);
  z = (z ^ (z >> 13)) * 0xc2b2ae35u;
  z = z ^ (z >> 16);
  return z >= dropout.below ? static_cast<double>(dropout.scale) : 0;
}

template <class N>
struct Test {
  using Tensor = Buffer<N>;
  const Case& c;
  const Set& set;
  Report& report;
  Random& random;

  const AttentionKernels& kernels = *set.attention;
  int64_t key_heads = c.heads / c.group;
  // packed: three sequences, one of them without queries, one longer than the others
  int64_t packs = c.packed ? 3 : 1;
  int64_t all_queries = c.queries * (c.packed ? 2 : 1), all_keys = c.keys * (c.packed ? 2 : 1);
  std::vector<int64_t> query_starts = {0, c.queries, c.queries, all_queries};
  std::vector<int64_t> key_starts = {0, c.keys, c.keys + c.keys / 2, all_keys};
  int64_t rows = c.batches * c.heads * all_queries;

  Tensor query{rows * c.width}, key{c.batches * key_heads * all_keys * c.width};
  Tensor value{c.batches * key_heads * all_keys * c.value_width}, out{rows * c.value_width}, rest{rows * c.value_width};
  Tensor grad_out{rows * c.value_width}, d_query{query.size()}, d_key{key.size()}, d_value{value.size()};
  Buffer<F32> stats{2 * rows}, grad_lse{rows}, delta{rows}, row_sums{2 * rows};
  Buffer<F32> bias{c.heads * c.queries * c.keys}, d_bias{c.heads * c.queries * c.keys};
  Buffer<F32> mask{c.batches * c.queries * c.keys};
  std::vector<unsigned char> truth = std::vector<unsigned char>(static_cast<size_t>(mask.size()), 1);
  std::vector<Sigma> sigmas = {};
  std::vector<float> params = {};
  AttentionJob job{};

  Heads heads(typename N::Entry* data, int64_t heads, int64_t length, int64_t width) const {
    return {data, c.packed ? 0 : heads * length * width, length * width, width};
  }

  void prepare() {
    for (Tensor* t : {&query, &key, &value, &grad_out}) t->normal(random, 1);
    grad_lse.normal(random, 1);
    bias.normal(random, 1);
    for (int64_t i = 0; i < mask.size(); ++i) {
      // the first query of the first batch may see nothing at all
      const bool off = i < c.keys || random.uniform() < 0.3;
      truth[static_cast<size_t>(i)] = !off;
      mask.set(i, off ? (random.uniform() < 0.5 ? -infinity : F32::least) : random.normal());
    }
    if (c.with_nan) query.set((c.queries - 1) * c.width, nan);
    for (int64_t h = 0; h < (c.own_parameters ? c.heads : 1); ++h) {
      sigmas.emplace_back(c.order, random);
      sigmas.back().write(params);
    }
    job.dtype = N::dtype;
    job.order = c.order;
    job.batches = c.packed ? packs : c.batches;
    job.heads = c.heads;
    job.group = c.group;
    job.queries = c.queries;
    job.keys = c.keys;
    job.width = c.width;
    job.value_width = c.value_width;
    if (c.packed) job.query_starts = query_starts.data(), job.key_starts = key_starts.data();
    job.scale = 0.375f;
    job.causal = c.causal;
    job.left = c.left;
    job.right = c.right;
    job.dropout = {c.dropout, 12345, 0x40000000u, static_cast<float>(4.0 / 3)};
    job.query = heads(query.data(), c.heads, all_queries, c.width);
    job.key = heads(key.data(), key_heads, all_keys, c.width);
    job.value = heads(value.data(), key_heads, all_keys, c.value_width);
    job.out = heads(out.data(), c.heads, all_queries, c.value_width);
    if (!std::is_same_v<N, F32>) job.rest = heads(rest.data(), c.heads, all_queries, c.value_width);
    if (c.masking == Masking::boolean) {
      job.mask = {truth.data(), ScoreType::boolean, c.queries * c.keys, 0, c.keys, 1};
    } else if (c.masking == Masking::numbers) {
      job.mask = {mask.data(), ScoreType::f32, c.queries * c.keys, 0, c.keys, 1};
    }
    if (c.bias) job.bias = {bias.data(), ScoreType::f32, 0, c.queries * c.keys, c.keys, 1};
    job.params = params.data();
    job.set_of_head = c.own_parameters;
    job.stats = stats.data();
    job.stats_batch = c.packed ? 0 : c.heads * c.queries;
    job.stats_head = all_queries;
    job.stats_plane = rows;
  }

  void forward() {
    plan_forward(job, 2);
    const bool split = job.few_queries() && job.splits > 1;
    std::vector<float> parts(static_cast<size_t>(split ? job.splits * rows * (2 + (c.value_width + 15) / 16 * 16) : 0));
    job.parts = parts.data();
    const Scratch scratch(kernels.scratch_bytes(job, false));
    kernels.forward(job, 0, kernels.forward_items(job), scratch.get());
    if (split) kernels.merge(job, 0, rows, scratch.get());
  }

  // The sums behind the parameters' gradients, for each set.
  std::vector<double> backward() {
    const int64_t all = job.batches * key_heads, each = 4 * c.order;
    job.grad_out = heads(grad_out.data(), c.heads, all_queries, c.value_width);
    job.grad_key = heads(d_key.data(), key_heads, all_keys, c.width);
    job.grad_value = heads(d_value.data(), key_heads, all_keys, c.value_width);
    job.owner_batches = job.owner_key_heads = 1;
    for (Buffer<F32>* t : {&d_bias, &row_sums}) {
      for (int64_t i = 0; i < t->size(); ++i) t->set(i, 0);
    }
    if (c.bias) {
      job.grad_bias = job.bias;
      job.grad_bias.data = d_bias.data();
      job.owner_batches = job.batches;
    }
    job.owners = all / job.owner_batches;
    plan_backward(job);
    std::vector<float> grad_query(static_cast<size_t>(rows * ((c.width + 15) / 16 * 16)));
    job.grad_query = grad_query.data();
    const int64_t items = job.owners * job.items_of_owner();
    std::vector<double> sums(static_cast<size_t>(items * job.sets_of_item() * each));
    std::vector<Passed> turns(static_cast<size_t>(items));
    job.sums = sums.data();
    job.turns = turns.data();
    job.row_sums = row_sums.data();
    kernels.delta(job, grad_lse.data(), delta.data(), 0, rows);
    job.delta = delta.data();
    const Scratch scratch(kernels.scratch_bytes(job, true));
    kernels.backward(job, 0, items, scratch.get());
    kernels.collect(job, heads(d_query.data(), c.heads, all_queries, c.width), 0, rows);

    std::vector<double> total(sigmas.size() * static_cast<size_t>(each));
    auto add = [&](int64_t head, const double* from) {
      const auto to = static_cast<size_t>(c.own_parameters ? head * each : 0);
      for (size_t j = 0; j < static_cast<size_t>(each); ++j) total[to + j] += from[j];
    };
    const double* from = sums.data();
    for (int64_t item = 0; item < items; ++item) {
      for (int64_t i = 0; i < job.sets_of_item(); ++i, from += each) {
        add(item / job.items_of_owner() * job.sets_of_item() % c.heads + i, from);
      }
    }
    const int64_t lines = rows / job.stats_head;
    std::vector<double> settled(static_cast<size_t>(lines * each));
    kernels.settle(job, grad_lse.data(), settled.data(), 0, lines, scratch.get());
    for (int64_t line = 0; line < lines; ++line) add(line % c.heads, settled.data() + line * each);
    return total;
  }

  void run() {
    prepare();
    forward();
    const std::vector<double> sums = backward();

    auto zeros = [](int64_t n) { return std::vector<double>(static_cast<size_t>(n)); };
    std::vector<double> e_out = zeros(out.size()), e_query = zeros(query.size()), e_key = zeros(key.size());
    std::vector<double> e_value = zeros(value.size()), e_bias = zeros(d_bias.size()), e_lse(zeros(rows));
    std::vector<double> e_sums(sums.size()), sizes(sums.size());
    double query_size = 1e-30, key_size = 1e-30, value_size = 1e-30, bias_size = 1e-30;
    std::vector<double> key_sizes(e_key), value_sizes(e_value);
    for (int64_t b = 0; b < job.batches; ++b) {
      const int64_t batch = c.packed ? 0 : b;
      const int64_t q0 = c.packed ? query_starts[static_cast<size_t>(b)] : 0;
      const int64_t k0 = c.packed ? key_starts[static_cast<size_t>(b)] : 0;
      const int64_t queries = c.packed ? query_starts[static_cast<size_t>(b + 1)] - q0 : c.queries;
      const int64_t keys = c.packed ? key_starts[static_cast<size_t>(b + 1)] - k0 : c.keys;
      for (int64_t h = 0; h < c.heads; ++h) {
        const size_t which = c.own_parameters ? static_cast<size_t>(h) : 0;
        const Sigma& sigma = sigmas[which];
        for (int64_t i = 0; i < queries; ++i) {
          const int64_t row = (batch * c.heads + h) * all_queries + q0 + i;
          const int64_t first_key = (batch * key_heads + h / c.group) * all_keys + k0;
          std::vector<double> x, s;
          for (int64_t j = 0; j < keys; ++j) {
            double dot = 0;
            for (int64_t d = 0; d < c.width; ++d) {
              dot += query[row * c.width + d] * key[(first_key + j) * c.width + d];
            }
            x.push_back(dot * static_cast<double>(job.scale));
            if (c.bias) x.back() += bias[(h * c.queries + i) * c.keys + j];
            s.push_back(sigma.value(x.back()));
            const int64_t at = (batch * c.queries + i) * c.keys + j, diagonal = j - (i + keys - queries);
            bool off =
                (c.causal && j > i) || (c.left >= 0 && diagonal < -c.left) || (c.right >= 0 && diagonal > c.right);
            if (c.masking == Masking::boolean) off |= !truth[static_cast<size_t>(at)];
            if (c.masking == Masking::numbers) {
              off |= mask[at] <= F32::least / 2;
              s.back() += mask[at];
            }
            if (off) s.back() = -infinity;
          }
          const Weights weights(s);
          e_lse[static_cast<size_t>(row)] = weights.top + std::log(weights.total);
          std::vector<double> dp(s.size());
          double mean = -grad_lse[row], mean_size = std::fabs(mean);
          for (int64_t j = 0; j < keys; ++j) {
            const double p = weights.p[static_cast<size_t>(j)];
            if (p == 0) continue;
            const double factor = kept(job.dropout, batch * c.heads + h, i, j);
            for (int64_t d = 0; d < c.value_width; ++d) {
              const double v = value[(first_key + j) * c.value_width + d], g = grad_out[row * c.value_width + d];
              e_out[static_cast<size_t>(row * c.value_width + d)] += p * factor * v;
              e_value[static_cast<size_t>((first_key + j) * c.value_width + d)] += p * factor * g;
              value_sizes[static_cast<size_t>((first_key + j) * c.value_width + d)] += std::fabs(p * factor * g);
              dp[static_cast<size_t>(j)] += factor * v * g;
            }
            mean += p * dp[static_cast<size_t>(j)];
            mean_size += std::fabs(p * dp[static_cast<size_t>(j)]);
          }
          std::vector<double> line_size(static_cast<size_t>(c.width));
          for (int64_t j = 0; j < keys; ++j) {
            const double p = weights.p[static_cast<size_t>(j)], a = x[static_cast<size_t>(j)];
            if (p == 0) continue;
            const double ds = p * (dp[static_cast<size_t>(j)] - mean);
            const double size = std::fabs(p) * (std::fabs(dp[static_cast<size_t>(j)]) + mean_size);
            const double slope = sigma.slope(a), dx = ds * slope;
            sigma.add(a, ds, size, &e_sums[which * static_cast<size_t>(4 * c.order)],
                      &sizes[which * static_cast<size_t>(4 * c.order)]);
            if (c.bias) e_bias[static_cast<size_t>((h * c.queries + i) * c.keys + j)] += dx;
            bias_size = std::max(bias_size, std::isfinite(size * slope) ? std::fabs(size * slope) : 0);
            for (int64_t d = 0; d < c.width; ++d) {
              const double of_query = query[row * c.width + d], of_key = key[(first_key + j) * c.width + d];
              const auto scale = static_cast<double>(job.scale);
              e_query[static_cast<size_t>(row * c.width + d)] += scale * dx * of_key;
              e_key[static_cast<size_t>((first_key + j) * c.width + d)] += scale * dx * of_query;
              line_size[static_cast<size_t>(d)] += std::fabs(scale * size * slope * of_key);
              key_sizes[static_cast<size_t>((first_key + j) * c.width + d)] +=
                  std::fabs(scale * size * slope * of_query);
            }
          }
          query_size = std::max(query_size, largest(line_size));
        }
      }
    }
    key_size = std::max(key_size, largest(key_sizes));
    value_size = std::max(value_size, largest(value_sizes));

    // weights and their gradients are rounded to bfloat16 on the way, where products are of these
    const double more = set.pairs ? BF16::rounding * 1.5 : 0;
    report.numbers("out", out, e_out, std::max(largest(e_out), 1e-30), tolerance<N>(64) + more);
    for (int64_t row = 0; row < rows; ++row) {
      const double lse = stats[row] + std::log(stats[rows + row]), expected = e_lse[static_cast<size_t>(row)];
      report.number("log-sum", row, lse, expected, std::max(std::fabs(expected), 1.0), tolerance<F32>(64));
    }
    report.numbers("d_query", d_query, e_query, query_size, tolerance<N>(64) + more);
    report.numbers("d_key", d_key, e_key, key_size, tolerance<N>(64) + more);
    report.numbers("d_value", d_value, e_value, value_size, tolerance<N>(64) + more);
    if (c.bias) report.numbers("d_bias", d_bias, e_bias, bias_size, tolerance<F32>(64) + more);
    for (size_t j = 0; j < sums.size(); ++j) {
      report.number("sum", static_cast<int64_t>(j), sums[j], e_sums[j], sizes[j], tolerance<F32>(64) + more);
    }
  }
};

}  // namespace

void test_attention(const Set& set, Report& report) {
  std::vector<Case> cases;
  for (int order : {1, 2, 3}) {
    cases.push_back({order, 1, 2, 1, 5, 7, 3, 5});
    cases.push_back({order, 2, 2, 1, 20, 33, 16, 19});
  }
  auto add = [&](Case c, auto change) {
    change(c);
    cases.push_back(c);
  };
  for (const Case& c :
       {Case{2, 2, 4, 2, 50, 70, 17, 20}, Case{2, 2, 4, 2, 3, 70, 17, 20}}) {  // the second: few queries
    add(c, [](Case& c) { c.masking = Masking::boolean; });
    add(c, [](Case& c) { c.masking = Masking::numbers; });
    add(c, [](Case& c) { c.bias = c.own_parameters = true; });
    add(c, [](Case& c) { c.causal = c.with_nan = true; });
    add(c, [](Case& c) { c.dropout = true, c.left = 20, c.right = 5; });
    add(c, [](Case& c) { c.packed = true, c.batches = 1, c.left = 11; });
  }
  cases.push_back({2, 1, 1, 1, 100, 200, 64, 64});
  cases.push_back({1, 1, 2, 2, 3, 1100, 24, 16});  // keys in two splits
  each_type([&]<class N>(int) {
    if constexpr (!std::is_same_v<N, F64>) {
      if (set.pairs && !std::is_same_v<N, BF16>) return;
      Random random(4);
      for (const Case& c : cases) {
        report.where = std::string(set.name) + " attention " + N::name + ", " + c.name();
        Test<N>{c, set, report, random}.run();
      }
      report.line(std::string(set.name) + " attention " + N::name);
    }
  });
}

}  // namespace selftest
