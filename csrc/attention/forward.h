// Attention's forward: an online softmax over blocks of keys.
#pragma once

#include "attention/tile.h"

namespace multimax::MULTIMAX_ISA {
namespace {

struct ForwardScratch {
  float *query, *out, *top, *total, *key, *key_rows, *value, *tile, *factor;
  int64_t bytes;

  ForwardScratch(const AttentionJob& job, void* memory) {
    Pieces pieces(memory, pieces_gap);
    int64_t rows = item_units * query_block, width = padded(job.width), value_width = padded(job.value_width);
    query = pieces.take<float>(rows * width);
    out = pieces.take<float>(rows * value_width);
    top = pieces.take<float>(rows);
    total = pieces.take<float>(rows * S::width);
    key = pieces.take<float>(width * key_block);
    key_rows = pieces.take<float>(16 * width);
    value = pieces.take<float>(key_block * value_width);
    tile = pieces.take<float>(query_block * key_block);
    factor = pieces.take<float>(query_block);
    bytes = pieces.bytes;
  }
};

inline int64_t items_of_group(const AttentionJob& job) {
  return ceil_div(blocks_of(job.queries) * job.group, item_units);
}

inline int64_t forward_items(const AttentionJob& job) { return job.batches * job.key_heads() * items_of_group(job); }

// x -> s = sigma(x), and the row's largest
template <int N>
void modulate(const Tile& t, const Params<float>& params, float* largest) {
  const Vectors<S, N> f(params);
  const V floor = S::set(score_floor);
  const int64_t from = t.from(), to = t.to();
  for (int64_t r = 0; r < t.rows; ++r) {
    float* x = t.x + r * t.stride;
    V top = lowest();
    for (int64_t c = from; c < to; c += S::width) {
      V a = S::load(x + c);
      V s = S::select(S::le(a, floor), lowest(), sigma(f, a));
      top = S::max(s, top);
      S::store(x + c, s);
    }
    largest[r] = S::max(top);
  }
}

struct Forward {
  const AttentionJob& job;
  const ForwardScratch& w;
  const RowAccess& rows_of = row_access_of(job.dtype);
  decltype(&modulate<0>) modulate = with_order(job.order, []<int N>() { return multimax::MULTIMAX_ISA::modulate<N>; });

  static bool any_nan(const Tile& t) {  // the maximum does not show it
    auto nan = S::first(0);
    for (int64_t r = 0; r < t.rows; ++r) {
      for (int64_t c = t.from(); c < t.to(); c += S::width) {
        nan = S::either(nan, S::nan(S::load(t.x + r * t.stride + c)));
      }
    }
    return S::any(nan);
  }

  void find_largest(const Tile& t, float* largest) const {
    for (int64_t r = 0; r < t.rows; ++r) {
      V top = lowest();
      for (int64_t c = t.from(); c < t.to(); c += S::width) top = S::max(S::load(t.x + r * t.stride + c), top);
      largest[r] = S::max(top);
    }
  }

  // s -> exp(s - top), the sums, and what earlier results have to be multiplied with. False if the tile adds nothing,
  // because all of its exponentials are 0.
  bool exponentiate(const Tile& t, float* tops, float* totals, const float* largest) const {
    bool matters = false;
    for (int64_t r = 0; r < t.rows; ++r) {
      if (!(largest[r] < tops[r] + ExpConstants<float>::lowest)) matters = true;
    }
    if (!matters && !any_nan(t)) return false;
    const int64_t from = t.from(), to = t.to();
    for (int64_t r = 0; r < t.rows; ++r) {
      float* s = t.x + r * t.stride;
      V old = S::set(tops[r]), top = S::max(S::set(largest[r]), old), base = finite(top), sum{};
      for (int64_t c = from; c < to; c += S::width) {
        V e = exp<S>(S::load(s + c) - base);
        sum = sum + e;
        S::store(s + c, e);
      }
      V factor = exp<S>(old - base);
      S::store(totals + r * S::width, S::load(totals + r * S::width) * factor + sum);
      float lanes[S::width];
      S::store(lanes, factor);
      w.factor[r] = lanes[0];
      S::store(lanes, top);
      tops[r] = lanes[0];
    }
    return true;
  }

  void drop(const Tile& t) const {
    for (int64_t r = 0; r < t.rows; ++r) {
      DropoutRow row(job.dropout, t.b * job.heads + t.head, t.query + r);
      float* p = t.x + r * t.stride;
      for (int64_t c = t.from(); c < t.to(); c += S::width) {
        S::store(p + c, S::load(p + c) * row.factor(job.dropout, t.key + c));
      }
    }
  }

  void tile(Tile& t, const Band& band, const float* query, float* out, float* tops, float* totals, const float* value,
            int64_t value_row) const {
    int64_t width = padded(job.width), from = t.from();
    Product<S>{query, width, 1, w.key + from, key_block, t.x + from, t.stride, job.width, Start::zero, nullptr}.run(
        t.rows, t.to() - from);
    float largest[query_block];
    add_bias(job, t);
    modulate(t, params_of(job, t.head), largest);
    if (t.edge || job.mask.type != ScoreType::none) {
      apply_mask(job, t, band, t.x);
      find_largest(t, largest);
    }
    if (!exponentiate(t, tops, totals, largest)) return;
    if (job.dropout.on) drop(t);
    Product<S>{
        t.x + t.begin,   t.stride,      1,       value + t.begin * value_row, value_row, out, padded(job.value_width),
        t.end - t.begin, Start::scaled, w.factor}
        .run(t.rows, padded(job.value_width));
  }

  void finish(int64_t b, int64_t head, int64_t query, int64_t rows, const Sequence& sequence, const float* out,
              const float* tops, const float* totals) const {
    for (int64_t r = 0; r < rows; ++r) {
      float total = S::sum(S::load(totals + r * S::width)), top = tops[r];
      if (top == minus_infinity<float>() && total == 0) top = 0;  // nothing took part
      float norm = total == 0 ? 0 : 1 / total;
      int64_t row = sequence.first_query + query + r;
      const Place home{b, head, row};
      const float* sums = out + r * padded(job.value_width);
      rows_of.write(job.out, home, sums, job.value_width, S::set(norm));
      if (job.rest.data) rows_of.write_lost(job.rest, job.out, home, sums, job.value_width, S::set(norm));
      float* stats = job.stats + b * job.stats_batch + head * job.stats_head + row;
      stats[0] = top;
      stats[job.stats_plane] = total;
    }
  }

  void run(int64_t item) const {
    int64_t per_group = items_of_group(job), part = item % per_group;
    // heavy and light parts of a causal call in turn: neighbouring items go to one thread
    part = part % 2 ? per_group - 1 - part / 2 : part / 2;
    int64_t key_head = item / per_group % job.key_heads(), b = item / per_group / job.key_heads();
    const Sequence sequence(job, b);
    const Band band(job, sequence);
    int64_t blocks = blocks_of(sequence.queries), width = padded(job.width), value_width = padded(job.value_width);
    int64_t first_unit = part * item_units, units = min(item_units, blocks * job.group - first_unit);
    if (units <= 0) return;

    struct Unit {
      int64_t head, query, rows;
    } unit[item_units];
    int64_t first_key = sequence.keys, last_key = 0;
    for (int64_t u = 0; u < units; ++u) {
      int64_t query = (first_unit + u) % blocks * query_block;
      unit[u] = {key_head * job.group + (first_unit + u) / blocks, query, min(query_block, sequence.queries - query)};
      first_key = min(first_key, band.first(query));
      last_key = max(last_key, band.last(query + unit[u].rows - 1));
      rows_of.pack(w.query + u * query_block * width, job.query, {b, unit[u].head, sequence.first_query + query},
                   unit[u].rows, job.width, job.scale);
      for (int64_t i = 0; i < unit[u].rows; ++i) w.top[u * query_block + i] = minus_infinity<float>();
    }
    for (int64_t i = 0; i < units * query_block * value_width; i += S::width) S::store(w.out + i, V{});
    for (int64_t i = 0; i < units * query_block * S::width; i += S::width) S::store(w.total + i, V{});

    for (int64_t key = first_key / key_block * key_block; key < last_key; key += key_block) {
      int64_t keys = min(key_block, sequence.keys - key);
      bool packed = false;
      int64_t value_row = 0;
      const float* value = nullptr;
      for (int64_t u = 0; u < units; ++u) {
        Tile t{b, unit[u].head, unit[u].query, unit[u].rows, key, 0, 0, false, w.tile, key_block};
        if (!clip(t, band, keys) || !any_left(job, t)) continue;
        if (!packed) {
          packed = true;
          const Place first{b, key_head, sequence.first_key + key};
          rows_of.pack_transposed(w.key, key_block, w.key_rows, job.key, first, keys, job.width);
          value = rows_of.in_place_or_packed(job.value, first, w.value, keys, job.value_width, value_row);
        }
        tile(t, band, w.query + u * query_block * width, w.out + u * query_block * value_width, w.top + u * query_block,
             w.total + u * query_block * S::width, value, value_row);
      }
    }
    for (int64_t u = 0; u < units; ++u) {
      finish(b, unit[u].head, unit[u].query, unit[u].rows, sequence, w.out + u * query_block * value_width,
             w.top + u * query_block, w.total + u * query_block * S::width);
    }
  }
};

}  // namespace
}  // namespace multimax::MULTIMAX_ISA
