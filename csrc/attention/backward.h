// Attention's backward: the weights of a tile again, and all gradients from them.
#pragma once

#include <sched.h>

#include "attention/dots.h"
#include "attention/tile.h"

namespace multimax::MULTIMAX_ISA {
namespace {

struct BackwardScratch {
  float *query, *query_down, *grad_out, *grad_out_down, *key, *key_down, *value;  // operands
  float *rows, *grad_key, *grad_value, *x, *p, *ds, *dropped, *slopes;
  V* lanes;
  double* folded;  // (sets, 4 order, width)
  int64_t bytes;

  BackwardScratch(const AttentionJob& job, void* memory) {
    Pieces pieces(memory, pieces_gap);
    constexpr int64_t tile = query_block * key_block_backward;
    int64_t width = padded(job.width), value_width = padded(job.value_width);
    query = pieces.take<float>(query_block * row_entries(job.width));
    query_down = terms == 1 ? query : pieces.take<float>(entries(query_block) * width);
    grad_out = pieces.take<float>(query_block * row_entries(job.value_width));
    grad_out_down = terms == 1 ? grad_out : pieces.take<float>(entries(query_block) * value_width);
    key = pieces.take<float>(key_block_backward * row_entries(job.width));
    key_down = pieces.take<float>(entries(key_block_backward) * width);
    value = pieces.take<float>(key_block_backward * row_entries(job.value_width));
    rows = pieces.take<float>(16 * max(row_entries(job.width), row_entries(job.value_width)));
    grad_key = pieces.take<float>(key_block_backward * width);
    grad_value = pieces.take<float>(key_block_backward * value_width);
    x = pieces.take<float>(tile);
    p = pieces.take<float>(tile);
    ds = pieces.take<float>(tile);
    dropped = pieces.take<float>(job.dropout.on ? tile : 0);
    slopes = pieces.take<float>(2 * job.order);
    lanes = pieces.take<V>(4 * job.order);
    folded = pieces.take<double>(job.sums ? job.sets_of_item() * 4 * job.order * S::width : 0);
    bytes = pieces.bytes;
  }
};

constexpr int64_t stride = key_block_backward;  // of a tile

// Blocks of keys are items of their own, which threads compute at the same time, and all of them add to the gradients
// of the queries. They take turns: for each block of queries, an item waits until the one before it, with the keys
// before its own, has passed. So sums grow in the order of keys, whoever computes them, and nothing is added at once.
class Turn {
 public:
  Turn(Passed* passed, bool first) : mine_(&passed->blocks), before_(first ? nullptr : &passed[-1].blocks) {}

  void wait() const {
    if (before_ == nullptr) return;
    for (int tries = 0; __atomic_load_n(before_, __ATOMIC_ACQUIRE) <= at_; ++tries) {
      if (tries >= 1000) sched_yield();
    }
  }
  void pass() {
    wait();
    __atomic_store_n(mine_, ++at_, __ATOMIC_RELEASE);
  }

  // of a packed sequence that has fewer keys than the longest: those before this one have nothing to add either
  void leave() { __atomic_store_n(mine_, INT64_MAX, __ATOMIC_RELEASE); }

 private:
  int64_t *mine_, *before_;
  int64_t at_ = 0;
};

// p = exp(s - top) / total; false if all of them are 0
template <int N>
bool weights(const AttentionJob& job, const BackwardScratch& w, const Tile& t, const Band& band, const float* tops) {
  const Vectors<S, N> f(params_of(job, t.head));
  const V floor = S::set(score_floor);
  const int64_t from = t.from(), to = t.to();
  const bool masks = t.edge || job.mask.type != ScoreType::none;
  auto any = S::first(0);
  auto weight = [&](V s, auto off, int64_t r, float* p) __attribute__((always_inline)) {
    float total = tops[r + job.stats_plane];
    // 0 where masked even if top is NaN: that does not reach what the row does not see
    V e = S::zero_if(off, exp<S>(s - S::set(tops[r])) * S::set(total == 0 ? 0 : 1 / total));
    any = S::either(any, S::not_ge(V{}, e));  // above 0, or NaN
    S::store(p, e);
  };
  for (int64_t r = 0; r < t.rows; ++r) {
    float *x = t.x + r * stride, *p = w.p + r * stride;
    for (int64_t c = from; c < to; c += S::width) {
      V a = S::load(x + c);
      auto off = S::le(a, floor);
      if (S::any(off)) S::store(x + c, S::zero_if(off, a));  // 0 * inf would be NaN
      V s = S::select(off, lowest(), sigma(f, a));
      if (masks) {
        S::store(p + c, s);
      } else {
        weight(s, off, r, p + c);
      }
    }
  }
  if (masks) {
    apply_mask(job, t, band, w.p);
    for (int64_t r = 0; r < t.rows; ++r) {
      for (int64_t c = from; c < to; c += S::width) {
        V s = S::load(w.p + r * stride + c);
        weight(s, S::le(s, lowest()), r, w.p + r * stride + c);
      }
    }
  }
  return S::any(any);
}

// As sigma_backward wants them.
inline Params<float> slopes_of(const AttentionJob& job, const BackwardScratch& w, int64_t head) {
  Params<float> params = params_of(job, head);
  for (int i = 0; i < 2 * job.order; ++i) w.slopes[i] = params.c[i] * static_cast<float>(i % job.order + 1);
  params.c = w.slopes;
  params.e = w.slopes + job.order;
  return params;
}

// ds holds the gradient of p; it becomes that of x, and the parameters' sums grow
template <int N, bool WithParams>
void scores(const AttentionJob& job, const BackwardScratch& w, const Tile& t, const float* delta, double* folded,
            float* row_sums) {
  const Vectors<S, N> slopes(slopes_of(job, w, t.head));
  const int64_t from = t.from(), to = t.to();
  V in_registers[N == 0 ? 1 : 4 * N];
  V* sums = N == 0 ? w.lanes : in_registers;
  for (int j = 0; j < 4 * slopes.order(); ++j) sums[j] = V{};
  for (int64_t r = 0; r < t.rows; ++r) {
    const float *x = t.x + r * stride, *p = w.p + r * stride;
    float* ds = w.ds + r * stride;
    const V of_row = S::set(delta[r]);
    V left{}, mean{};
    for (int64_t c = from; c < to; c += S::width) {
      V a = S::load(x + c), weight = S::load(p + c), d = weight * (S::load(ds + c) - of_row);
      if constexpr (WithParams) {
        left = left + d;
        mean = mean + weight * a;
      }
      S::store(ds + c, sigma_backward<WithParams>(slopes, a, d, sums));
    }
    if constexpr (WithParams) {
      row_sums[r] += S::sum(left);
      row_sums[r + job.stats_plane] += S::sum(mean);
    }
  }
  if constexpr (WithParams) {
    for (int j = 0; j < 4 * slopes.order(); ++j) S::add_to(folded + j * S::width, sums[j]);
  }
}

struct Backward {
  const AttentionJob& job;
  const BackwardScratch& w;
  const RowAccess rows_of = row_access_of(job.dtype);
  decltype(&few_scores<bf16>) few_scores =
      with_row_type(job.dtype, []<class T>() { return multimax::MULTIMAX_ISA::few_scores<T>; });
  decltype(&weights<0>) weights = with_order(job.order, []<int N>() { return multimax::MULTIMAX_ISA::weights<N>; });
  decltype(&scores<0, true>) scores = with_order(job.order, [&]<int N>() {
    namespace isa = multimax::MULTIMAX_ISA;
    return job.sums != nullptr ? isa::scores<N, true> : isa::scores<N, false>;
  });

  // both p, for the product with grad_out, and its gradient
  void drop(const Tile& t) const {
    for (int64_t r = 0; r < t.rows; ++r) {
      DropoutRow row(job.dropout, t.b * job.heads + t.head, t.query + r);
      for (int64_t c = t.from(); c < t.to(); c += S::width) {
        int64_t at = r * stride + c;
        V factor = row.factor(job.dropout, t.key + c);
        S::store(w.dropped + at, S::load(w.p + at) * factor);
        S::store(w.ds + at, S::load(w.ds + at) * factor);
      }
    }
  }

  void add_to_bias(const Tile& t) const {
    const Scores& m = job.grad_bias;
    for (int64_t r = 0; r < t.rows; ++r) {
      float* to =
          static_cast<float*>(m.data) + t.b * m.batch + t.head * m.head + (t.query + r) * m.row + t.key * m.column;
      const float* ds = w.ds + r * stride;
      if (m.column == 0) {
        float sum = 0;
        for (int64_t c = t.begin; c < t.end; ++c) sum += ds[c];
        *to += sum;
      } else {
        for (int64_t c = t.begin; c < t.end; ++c) to[c] += ds[c];
      }
    }
  }

  void tile(Tile& t, const Band& band, const Sequence& sequence, const Turn& turn, double* folded) const {
    int64_t width = padded(job.width), value_width = padded(job.value_width), from = t.from(), columns = t.to() - from;
    int64_t keys = t.end - t.begin, row = sequence.first_query + t.query;
    int64_t at = t.b * job.stats_batch + t.head * job.stats_head + row;
    const Place first{t.b, t.head, row};
    rows_of.pack(w.query, job.query, first, t.rows, job.width);
    if (job.few_queries()) {  // summed as in the forward: else weights and log-sum would not fit each other
      few_scores(job, w.query, t.rows, {t.b, t.head / job.group, sequence.first_key + t.key}, from, t.end, t.x, stride);
    } else {
      TileProduct{w.query, row_entries(job.width), 1,         w.key + from, stride, t.x + from,
                  stride,  entries(job.width),     job.scale, Start::zero,  nullptr}
          .run(t.rows, columns);
    }
    add_bias(job, t);
    if (!weights(job, w, t, band, job.stats + at)) return;

    int64_t down_row;
    const float* grad_out_down = rows_of.down(job.grad_out, first, w.grad_out_down, t.rows, job.value_width, down_row);
    const float* grad_out = grad_out_down;
    int64_t out_row = down_row;
    if (terms > 1) {
      rows_of.pack(w.grad_out, job.grad_out, first, t.rows, job.value_width);
      rows_of.pack_down(w.query_down, job.query, first, t.rows, job.width);
      grad_out = w.grad_out;
      out_row = row_entries(job.value_width);
    }
    TileProduct{grad_out, out_row,     1,      w.value + from, stride, w.ds + from, stride, entries(job.value_width),
                1,        Start::zero, nullptr}
        .run(t.rows, columns);
    if (job.dropout.on) drop(t);

    turn.wait();
    float* row_sums = job.sums == nullptr ? nullptr : job.row_sums + at;
    scores(job, w, t, job.delta + at, folded, row_sums);
    if (job.grad_bias.data != nullptr) add_to_bias(t);

    const int64_t first_key = t.begin / terms, tile_down = terms * stride;
    const float* p = down_columns(job.dropout.on ? w.dropped : w.p, stride, t.rows, from, t.to());
    const float* ds = along_rows(w.ds, stride, t.rows, from, t.to(), w.x);
    const float* ds_down = down_columns(w.ds, stride, t.rows, from, t.to());
    TileProduct{
        p + t.begin,     1, tile_down,  grad_out_down, down_row, w.grad_value + t.begin * value_width, value_width,
        entries(t.rows), 1, Start::add, nullptr}
        .run(keys, value_width);
    TileProduct{ds_down + t.begin, 1,         tile_down,  w.query_down, width, w.grad_key + t.begin * width, width,
                entries(t.rows),   job.scale, Start::add, nullptr}
        .run(keys, width);
    TileProduct{ds + first_key,
                stride,
                1,
                w.key_down + first_key * width,
                width,
                job.grad_query + at * width,
                width,
                entries(t.end) - first_key,
                job.scale,
                Start::add,
                nullptr}
        .run(t.rows, width);
  }

  // Blocks of keys of one batch and key head.
  void run(int64_t b, int64_t key_head, int64_t first_block, int64_t last_block, Turn& turn, double* folded) const {
    const Sequence sequence(job, b);
    const Band band(job, sequence);
    int64_t width = padded(job.width), value_width = padded(job.value_width);
    int64_t last_key = min(last_block * stride, sequence.keys);
    if (first_block * stride >= last_key) return turn.leave();
    for (int64_t key = first_block * stride; key < last_key; key += stride) {
      int64_t keys = min(stride, last_key - key);
      const Place first{b, key_head, sequence.first_key + key};
      bool packed = false;
      for (int64_t i = 0; i < stride * width; i += S::width) S::store(w.grad_key + i, V{});
      for (int64_t i = 0; i < stride * value_width; i += S::width) S::store(w.grad_value + i, V{});
      for (int64_t h = 0; h < job.group; ++h) {
        double* of_head = folded + (job.set_of_head ? h * 4 * job.order * S::width : 0);
        for (int64_t query = 0; query < sequence.queries; query += query_block, turn.pass()) {
          Tile t{
              b,     key_head * job.group + h, query, min(query_block, sequence.queries - query), key, 0, 0, false, w.x,
              stride};
          if (!clip(t, band, keys) || !any_left(job, t)) continue;
          if (!packed) {
            packed = true;
            rows_of.pack_transposed(w.key, stride, w.rows, job.key, first, keys, job.width);
            rows_of.pack_transposed(w.value, stride, w.rows, job.value, first, keys, job.value_width);
            rows_of.pack_down(w.key_down, job.key, first, keys, job.width);
          }
          tile(t, band, sequence, turn, of_head);
        }
      }
      for (int64_t k = 0; k < keys; ++k) {
        const Place home{b, key_head, first.row + k};
        rows_of.write(job.grad_key, home, w.grad_key + k * width, job.width, S::set(1));
        rows_of.write(job.grad_value, home, w.grad_value + k * value_width, job.value_width, S::set(1));
      }
    }
  }

  void run(int64_t item) const {
    // Late keys first: in a causal call only late queries see them, and those of early ones come to these last.
    int64_t owner = item / job.items_of_owner(), block = job.items_of_owner() - 1 - item % job.items_of_owner();
    int64_t last_block = job.blocks_together ? ceil_div(job.keys, stride) : block + 1;
    int64_t across = job.key_heads() / job.owner_key_heads;
    int64_t first_batch = owner / across * job.owner_batches, first_key_head = owner % across * job.owner_key_heads;
    int64_t all = job.sums ? job.sets_of_item() * 4 * job.order : 0;
    for (int64_t i = 0; i < all * S::width; ++i) w.folded[i] = 0;
    Turn turn(job.turns + item, item % job.items_of_owner() == 0);
    for (int64_t b = first_batch; b < first_batch + job.owner_batches; ++b) {
      for (int64_t k = 0; k < job.owner_key_heads; ++k) {
        double* folded = w.folded + (job.set_of_head ? k * job.group * 4 * job.order * S::width : 0);
        run(b, first_key_head + k, block, last_block, turn, folded);
      }
    }
    for (int64_t j = 0; j < all; ++j) {
      double sum = 0;
      for (int i = 0; i < S::width; ++i) sum += w.folded[j * S::width + i];
      job.sums[item * all + j] = sum;
    }
  }
};

// A row's ds add up to 0, or to the gradient of its log-sum, but for rounding: that of delta, which all of the row's ds
// share, and which the parameters' sums, of ds times something that depends on x, therefore would show. As the ds ought
// to add up so, the same constant may be taken from that something in a whole row; its value at the row's mean x is
// close to its mean, and what is left of the error is small. By linearity that is one more entry of each row: x its
// mean, ds what there is too much of it.
template <int N>
void settle_line(const AttentionJob& job, const BackwardScratch& w, const float* grad_lse, double* to, int64_t line) {
  const Vectors<S, N> slopes(slopes_of(job, w, line % job.heads));
  for (int j = 0; j < 4 * job.order; ++j) w.lanes[j] = V{};
  for (int64_t i = 0; i < job.stats_head; i += S::width) {
    int n = static_cast<int>(min(S::width, job.stats_head - i));
    int64_t row = line * job.stats_head + i;
    V left = S::load(job.row_sums + row, n), mean = S::load(job.row_sums + job.stats_plane + row, n);
    if (grad_lse) left = left - S::load(grad_lse + row, n);
    left = S::zero_if(S::le(S::load(job.stats + job.stats_plane + row, n), V{}), left);  // rows without keys
    sigma_backward<true>(slopes, mean, -left, w.lanes);
  }
  for (int j = 0; j < 4 * job.order; ++j) to[j] = S::sum(w.lanes[j]);
}

void delta(const AttentionJob& job, const float* grad_lse, float* to, int64_t first, int64_t last) {
  const RowAccess rows_of = row_access_of(job.dtype);
  for (int64_t row = first; row < last; ++row) {
    const Place at = place_of(job, row);
    V sum{};
    if (job.rest.data != nullptr) sum = rows_of.dot(sum, job.rest, job.grad_out, at, job.value_width);
    if (job.out.data != nullptr) sum = rows_of.dot(sum, job.out, job.grad_out, at, job.value_width);
    to[row] = S::sum(sum) - (grad_lse ? grad_lse[row] : 0);
  }
}

void collect(const AttentionJob& job, const Heads& to, int64_t first, int64_t last) {
  const RowAccess rows_of = row_access_of(job.dtype);
  int64_t width = padded(job.width);
  for (int64_t row = first; row < last; ++row) {
    rows_of.write(to, place_of(job, row), job.grad_query + row * width, job.width, S::set(1));
  }
}

}  // namespace
}  // namespace multimax::MULTIMAX_ISA
