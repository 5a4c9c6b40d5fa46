// Attention on torch's stable ABI: check and describe the tensors, share the work over torch's threads, finish the
// sums.
#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>

#include "attention/plan.h"
#include "bindings/bindings.h"

namespace multimax {
namespace {

using OptionalTensor = std::optional<Tensor>;

// What forward and backward have in common, as the schema has it.
struct Options {
  double dropout_p, scale;
  bool causal;
  int64_t left, right;
};

int64_t stride_of(const Tensor& t, int64_t dim) { return t.size(dim) == 1 ? 0 : t.stride(dim); }

Heads heads_of(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.dim() == 4, "multimax: expected ", name, " of 4 dims, got ", t.dim());
  // torch does not copy a tensor without entries to make it contiguous
  STD_TORCH_CHECK(t.size(3) <= 1 || t.stride(3) == 1 || t.numel() == 0, "multimax: expected ", name,
                  " with a contiguous last dim");
  return {data_of(t), stride_of(t, 0), stride_of(t, 1), stride_of(t, 2)};
}

void same_size(int64_t got, int64_t expected, const char* what) {
  STD_TORCH_CHECK(got == expected, "multimax: expected ", what, " of ", expected, ", got ", got);
}

class Attention {
 public:
  AttentionJob job{};

  Attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& coefs, const Tensor& knots,
            const OptionalTensor& mask, const OptionalTensor& bias, const OptionalTensor& query_starts,
            const OptionalTensor& key_starts, const OptionalTensor& seed, const Options& options) {
    job.dtype = dtype_of(query);
    STD_TORCH_CHECK(job.dtype != DType::f64, "multimax: the attention kernels have no float64");
    for (const Tensor* t : {&key, &value}) {
      STD_TORCH_CHECK(dtype_of(*t) == job.dtype, "multimax: expected query, key and value of one dtype");
    }
    job.query = heads_of(query, "query");
    job.key = heads_of(key, "key");
    job.value = heads_of(value, "value");
    job.batches = query.size(0);
    job.heads = query.size(1);
    job.queries = query.size(2);
    job.keys = key.size(2);
    job.width = query.size(3);
    job.value_width = value.size(3);
    same_size(key.size(0), job.batches, "a key batch");
    same_size(value.size(0), job.batches, "a value batch");
    same_size(value.size(1), key.size(1), "value heads");
    same_size(value.size(2), job.keys, "a value length");
    same_size(key.size(3), job.width, "a key width");
    int64_t key_heads = key.size(1);
    STD_TORCH_CHECK(key_heads == job.heads || (key_heads > 0 && job.heads % key_heads == 0),
                    "multimax: query heads are no multiple of key heads");
    job.group = key_heads == 0 ? 1 : job.heads / key_heads;

    int64_t sets = coefs.dim() == 3 ? coefs.size(0) : 1;
    int64_t lead = coefs.dim() - 2;
    STD_TORCH_CHECK(lead == 0 || (lead == 1 && (sets == 1 || sets == job.heads)),
                    "multimax: coefs do not fit the heads");
    STD_TORCH_CHECK(coefs.size(lead + 1) == 2 && coefs.size(lead) >= 1, "multimax: coefs do not end in (order, 2)");
    STD_TORCH_CHECK(knots.dim() == coefs.dim(), "multimax: knots do not have the shape of coefs");
    for (int64_t i = 0; i < coefs.dim(); ++i) same_size(knots.size(i), coefs.size(i), "a dim of knots");
    job.order = static_cast<int>(coefs.size(lead));
    job.set_of_head = sets > 1;
    params_.emplace(coefs, knots, job.dtype);
    job.params = static_cast<const float*>(params_->data());

    job.scale = static_cast<float>(options.scale);
    job.causal = options.causal;
    job.left = options.left;
    job.right = options.right;
    job.mask = scores_of(mask, "mask");
    job.bias = scores_of(bias, "score_bias");
    STD_TORCH_CHECK(job.bias.type != ScoreType::boolean, "multimax: expected a floating-point score_bias");
    job.dropout.on = seed.has_value();
    if (seed) {
      STD_TORCH_CHECK(seed->scalar_type() == ScalarType::Long && seed->numel() == 1, "multimax: expected one seed");
      STD_TORCH_CHECK(options.dropout_p >= 0 && options.dropout_p <= 1, "multimax: expected dropout_p in [0, 1]");
      job.dropout.seed = static_cast<uint64_t>(*static_cast<const int64_t*>(data_of(*seed)));
      job.dropout.below = static_cast<uint32_t>(std::min(std::floor(options.dropout_p * 0x1p32), 0x1p32 - 1));
      job.dropout.scale = options.dropout_p < 1 ? static_cast<float>(1 / (1 - options.dropout_p)) : 0.0f;
    }
    rows_ = job.batches * job.heads * job.queries;
    job.stats_batch = stride_or_zero(job.batches, job.heads * job.queries);
    job.stats_head = std::max<int64_t>(job.queries, 1);
    if (query_starts) {
      STD_TORCH_CHECK(key_starts.has_value() && job.batches == 1, "multimax: packed sequences come in one batch");
      STD_TORCH_CHECK(!mask && !bias, "multimax: packed sequences take no mask and no bias");
      starts(*query_starts, query_starts_, job.queries, "query");
      starts(*key_starts, key_starts_, job.keys, "key");
      same_size(static_cast<int64_t>(key_starts_.size()), static_cast<int64_t>(query_starts_.size()), "key starts");
      job.query_starts = query_starts_.data();
      job.key_starts = key_starts_.data();
      job.batches = static_cast<int64_t>(query_starts_.size()) - 1;
      job.queries = longest(query_starts_);
      job.keys = longest(key_starts_);
      job.query.batch = job.key.batch = job.value.batch = job.stats_batch = 0;
    }
    job.stats_plane = rows_;
  }

  // of (B, H, Lq, Lk) with size 1 where it is the same for all
  Scores scores_of(const OptionalTensor& t, const char* name) const {
    Scores scores;
    if (!t) return scores;
    STD_TORCH_CHECK(t->dim() == 4, "multimax: expected ", name, " of 4 dims, got ", t->dim());
    const int64_t sizes[] = {job.batches, job.heads, job.queries, job.keys};
    for (int64_t i = 0; i < 4; ++i) {
      if (t->size(i) != 1) same_size(t->size(i), sizes[i], name);
    }
    scores.data = data_of(*t);
    scores.batch = stride_of(*t, 0);
    scores.head = stride_of(*t, 1);
    scores.row = stride_of(*t, 2);
    scores.column = stride_of(*t, 3);
    STD_TORCH_CHECK(scores.column == 0 || scores.column == 1 || t->numel() == 0, "multimax: expected ", name,
                    " with a contiguous last dim");
    switch (t->scalar_type()) {
      case ScalarType::Bool:
        scores.type = ScoreType::boolean;
        break;
      case ScalarType::Float:
        scores.type = ScoreType::f32;
        break;
      case ScalarType::BFloat16:
        scores.type = ScoreType::bf16;
        break;
      case ScalarType::Half:
        scores.type = ScoreType::f16;
        break;
      default:
        STD_TORCH_CHECK(false, "multimax: expected ", name, " of dtype bool, float32, bfloat16 or float16");
    }
    return scores;
  }

  // rest: empty where there is none
  void use_out(const Tensor& out, const Tensor& stats, const Tensor& rest) {
    job.out = heads_of(out, "out");
    if (rest.numel() != 0) {
      for (int64_t i = 0; i < 4; ++i) same_size(rest.size(i), out.size(i), "a dim of rest");
      job.rest = heads_of(rest, "rest");
    }
    if (job.query_starts) job.out.batch = job.rest.batch = 0;
    same_size(stats.numel(), 2 * rows_, "stats");
    STD_TORCH_CHECK(stats.is_contiguous() && dtype_of(stats) == DType::f32, "multimax: stats do not fit");
    job.stats = static_cast<float*>(data_of(stats));
  }

  int64_t rows() const { return rows_; }
  const Parameters& params() const { return *params_; }

 private:
  std::optional<Parameters> params_;
  std::vector<int64_t> query_starts_, key_starts_;
  int64_t rows_;

  static int64_t stride_or_zero(int64_t size, int64_t stride) { return size == 1 ? 0 : stride; }

  static void starts(const Tensor& t, std::vector<int64_t>& values, int64_t total, const char* name) {
    Tensor flat = torch::stable::contiguous(t);
    STD_TORCH_CHECK(flat.dim() == 1 && flat.numel() >= 1, "multimax: expected the starts of ", name, " in one dim");
    bool wide = flat.scalar_type() == ScalarType::Long;
    STD_TORCH_CHECK(wide || flat.scalar_type() == ScalarType::Int, "multimax: expected starts of dtype int32 or int64");
    for (int64_t i = 0; i < flat.numel(); ++i) {
      values.push_back(wide ? static_cast<const int64_t*>(data_of(flat))[i]
                            : static_cast<const int32_t*>(data_of(flat))[i]);
    }
    bool rising = values.front() == 0 && values.back() == total && std::is_sorted(values.begin(), values.end());
    STD_TORCH_CHECK(rising, "multimax: expected cu_seqlens of ", name, " to rise from 0 to ", total,
                    ", the number of its rows");
  }
  static int64_t longest(const std::vector<int64_t>& starts) {
    int64_t length = 0;
    for (size_t i = 1; i < starts.size(); ++i) length = std::max(length, starts[i] - starts[i - 1]);
    return length;
  }
};

// A result of (B, H, L, D), laid out in memory as (B, L, H, D) if `like` is.
Tensor new_heads(const Tensor& like, int64_t length, int64_t width) {
  bool heads_inside = like.stride(1) < like.stride(2);
  int64_t b = like.size(0), h = like.size(1);
  if (!heads_inside) return torch::stable::new_empty(like, {b, h, length, width});
  return torch::stable::transpose(torch::stable::new_empty(like, {b, length, h, width}), 1, 2);
}

// The output, each row's largest score and sum, (2, B, H, Lq), and, in half precision and if the backward is to follow,
// what rounding took from the output: the parameters' gradients would show it.
std::tuple<Tensor, Tensor, Tensor> attention_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                                     const Tensor& coefs, const Tensor& knots,
                                                     const OptionalTensor& mask, const OptionalTensor& bias,
                                                     const OptionalTensor& query_starts,
                                                     const OptionalTensor& key_starts, const OptionalTensor& seed,
                                                     double dropout_p, double scale, bool causal, int64_t left,
                                                     int64_t right, bool for_backward) {
  Attention plan(query, key, value, coefs, knots, mask, bias, query_starts, key_starts, seed,
                 {dropout_p, scale, causal, left, right});
  Tensor out = new_heads(query, query.size(2), value.size(3));
  Tensor stats = torch::stable::new_empty(query, {2, query.size(0), query.size(1), query.size(2)}, ScalarType::Float);
  bool with_rest = for_backward && plan.job.dtype != DType::f32;
  Tensor rest = with_rest ? new_heads(query, query.size(2), value.size(3)) : torch::stable::new_empty(query, {0});
  plan.use_out(out, stats, rest);
  AttentionJob& job = plan.job;
  const int64_t threads = torch::stable::get_num_threads();
  plan_forward(job, threads);
  bool split = job.few_queries() && job.splits > 1;
  int64_t part = split ? job.splits * plan.rows() * (2 + (job.value_width + 15) / 16 * 16) : 0;
  std::optional<Tensor> parts;
  if (part > 0) {
    parts = torch::stable::new_empty(query, {part}, ScalarType::Float);
    job.parts = static_cast<float*>(data_of(*parts));
  }
  const AttentionKernels& chosen = *kernels(job.dtype).attention;
  int64_t scratch_bytes = chosen.scratch_bytes(job, false);
  int64_t items = plan.rows() == 0 ? 0 : chosen.forward_items(job), workers = workers_for(job, items, threads);
  Stretches stretches(items, forward_stretches(job, workers));
  with_workers(workers, scratch_bytes, [&](int64_t worker, void* scratch) {
    for (int64_t item = stretches.take(worker); item >= 0; item = stretches.take(worker)) {
      chosen.forward(job, item, item + 1, scratch);
    }
  });
  share(split ? plan.rows() : 0, 64, scratch_bytes,
        [&](int64_t first, int64_t last, void* scratch) { chosen.merge(job, first, last, scratch); });
  return {out, stats, rest};
}

// Gradients of query, key, value, coefs, knots and bias; those of parameters and bias are empty unless asked for.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& coefs, const Tensor& knots, const OptionalTensor& mask, const OptionalTensor& bias,
    const OptionalTensor& query_starts, const OptionalTensor& key_starts, const OptionalTensor& seed, const Tensor& out,
    const Tensor& stats, const Tensor& rest, double dropout_p, double scale, bool causal, int64_t left, int64_t right,
    bool params_grad, bool bias_grad) {
  Attention plan(query, key, value, coefs, knots, mask, bias, query_starts, key_starts, seed,
                 {dropout_p, scale, causal, left, right});
  plan.use_out(out, stats, rest);
  AttentionJob& job = plan.job;
  bool packed = job.query_starts != nullptr;
  job.grad_out = heads_of(grad_out, "grad_out");
  STD_TORCH_CHECK(dtype_of(grad_out) == job.dtype, "multimax: expected grad_out of the query's dtype");
  for (int64_t i = 0; i < 4; ++i) same_size(grad_out.size(i), out.size(i), "a dim of grad_out");
  Tensor grad_key = new_heads(key, key.size(2), key.size(3));
  Tensor grad_value = new_heads(value, value.size(2), value.size(3));
  job.grad_key = heads_of(grad_key, "key");
  job.grad_value = heads_of(grad_value, "value");
  if (packed) job.grad_out.batch = job.grad_key.batch = job.grad_value.batch = 0;

  // Batches and heads that share a gradient of the bias belong to one owner.
  job.owner_batches = job.owner_key_heads = 1;
  Tensor grad_bias = torch::stable::new_empty(query, {0}, ScalarType::Float);
  if (bias_grad) {
    STD_TORCH_CHECK(bias.has_value(), "multimax: there is no score_bias to have a gradient");
    std::vector<int64_t> shape(bias->sizes().begin(), bias->sizes().end());
    grad_bias = torch::stable::new_zeros(query, shape, ScalarType::Float);
    job.grad_bias = plan.scores_of(grad_bias, "the gradient of score_bias");
    if (bias->size(0) == 1) job.owner_batches = job.batches;
    if (bias->size(1) == 1) job.owner_key_heads = job.key_heads();
  }
  int64_t all = job.batches * job.key_heads(), together = std::max<int64_t>(job.owner_batches * job.owner_key_heads, 1);
  job.owners = all / together;
  const AttentionKernels& chosen = *kernels(job.dtype).attention;
  plan_backward(job);

  int64_t width = (job.width + 15) / 16 * 16;
  Tensor grad_query = torch::stable::new_zeros(query, {query.size(0), query.size(1), query.size(2), query.size(3)});
  bool in_place = job.dtype == DType::f32 && width == job.width;
  Tensor sums_of_query =
      in_place ? grad_query : torch::stable::new_zeros(query, {plan.rows(), width}, ScalarType::Float);
  job.grad_query = static_cast<float*>(data_of(sums_of_query));
  Heads query_home = heads_of(grad_query, "query");
  if (packed) query_home.batch = 0;

  int64_t items = all == 0 ? 0 : job.owners * job.items_of_owner();
  std::vector<double> sums(params_grad ? static_cast<size_t>(items * job.sets_of_item() * 4 * job.order) : 0);
  if (params_grad) job.sums = sums.data();
  std::vector<Passed> turns(static_cast<size_t>(items));
  job.turns = turns.data();
  Tensor row_sums = torch::stable::new_zeros(query, {params_grad ? 2 * plan.rows() : 0}, ScalarType::Float);
  job.row_sums = static_cast<float*>(data_of(row_sums));

  constexpr int64_t rows_grain = 64;
  Tensor delta = torch::stable::new_empty(query, {plan.rows()}, ScalarType::Float);
  float* delta_at = static_cast<float*>(data_of(delta));
  const float* lse_at = nullptr;
  if (grad_lse) {
    same_size(grad_lse->numel(), plan.rows(), "grad_lse");
    STD_TORCH_CHECK(grad_lse->is_contiguous() && dtype_of(*grad_lse) == DType::f32, "multimax: grad_lse does not fit");
    lse_at = static_cast<const float*>(data_of(*grad_lse));
  }
  share(plan.rows(), rows_grain, 0,
        [&](int64_t first, int64_t last, void*) { chosen.delta(job, lse_at, delta_at, first, last); });
  job.delta = delta_at;
  int64_t workers = workers_for(job, items, torch::stable::get_num_threads());
  int64_t scratch_bytes = chosen.scratch_bytes(job, true);
  Items queue(items == 0 ? 0 : job.owners, job.items_of_owner(), workers);
  with_workers(workers, scratch_bytes, [&](int64_t worker, void* scratch) {
    int64_t owner = -1;
    for (int64_t item = queue.take(worker, owner); item >= 0; item = queue.take(worker, owner)) {
      chosen.backward(job, item, item + 1, scratch);
    }
  });
  share(in_place ? 0 : plan.rows(), rows_grain, 0,
        [&](int64_t first, int64_t last, void*) { chosen.collect(job, query_home, first, last); });

  std::vector<int64_t> shape = {0};
  if (params_grad) shape.assign(coefs.sizes().begin(), coefs.sizes().end());
  Tensor grad_coefs = torch::stable::new_empty(coefs, shape);
  Tensor grad_knots = torch::stable::new_empty(knots, shape);
  if (params_grad) {
    ParamGrads grads(plan.params());
    const double* sum = sums.data();
    for (int64_t item = 0; item < items; ++item) {
      for (int64_t set = 0; set < job.sets_of_item(); ++set, sum += 4 * job.order) {
        int64_t head = item / job.items_of_owner() * job.sets_of_item() % job.heads + set;
        grads.add(job.set_of_head ? head : 0, sum);
      }
    }
    int64_t lines = plan.rows() / job.stats_head;
    std::vector<double> settled(static_cast<size_t>(lines * 4 * job.order));
    share(lines, 1, scratch_bytes, [&](int64_t first, int64_t last, void* scratch) {
      chosen.settle(job, lse_at, settled.data(), first, last, scratch);
    });
    for (int64_t line = 0; line < lines; ++line) {
      grads.add(job.set_of_head ? line % job.heads : 0, settled.data() + line * 4 * job.order);
    }
    grads.write(grad_coefs, grad_knots);
  }
  return {grad_query, grad_key, grad_value, grad_coefs, grad_knots, grad_bias};
}

}  // namespace
}  // namespace multimax

STABLE_TORCH_LIBRARY_IMPL(multimax, CPU, m) {
  m.impl("attention_forward", TORCH_BOX(&multimax::attention_forward));
  m.impl("attention_backward", TORCH_BOX(&multimax::attention_backward));
}
