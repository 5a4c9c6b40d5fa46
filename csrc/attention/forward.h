// Attention's forward: an online softmax over blocks of keys.
#pragma once

#include "attention/division.h"
#include "attention/tile.h"

namespace multimax::MULTIMAX_ISA {
namespace {

struct ForwardScratch {
  float *query, *out, *top, *total, *key, *key_rows, *value, *tile, *factor;
  int64_t bytes;

  ForwardScratch(const AttentionJob& job, void* memory) {
    Pieces pieces(memory, pieces_gap);
    int64_t rows = max(job.item_units * query_block, few_rows), width = row_entries(job.width),
            value_width = padded(job.value_width);
    query = pieces.take<float>(rows * width);
    out = pieces.take<float>(rows * value_width);
    top = pieces.take<float>(rows);
    total = pieces.take<float>(rows * S::width);
    key = pieces.take<float>(width * key_block);
    key_rows = pieces.take<float>(16 * width);
    value = pieces.take<float>(entries(key_block) * value_width);
    tile = pieces.take<float>(max(query_block * key_block, few_rows * few_keys));
    factor = pieces.take<float>(query_block);
    bytes = pieces.bytes;
  }
};

inline int64_t forward_items(const AttentionJob& job) { return ForwardItem::count(job); }

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
  const RowAccess rows_of = row_access_of(job.dtype);
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
  bool exponentiate(const Tile& t, float* tops, float* totals, const float* largest, float* factors) const {
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
      factors[r] = lanes[0];
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

  // x -> weights without their norm; false if all of them are 0
  bool weigh(const Tile& t, const Band& band, float* tops, float* totals, float* factors) const {
    float largest[query_block];
    add_bias(job, t);
    modulate(t, params_of(job, t.head), largest);
    if (t.edge || job.mask.type != ScoreType::none) {
      apply_mask(job, t, band, t.x);
      find_largest(t, largest);
    }
    if (!exponentiate(t, tops, totals, largest, factors)) return false;
    if (job.dropout.on) drop(t);
    return true;
  }

  // out = diag(factors) out + weights value, for columns [begin, end) of `rows` rows of w.tile
  void add_values(int64_t rows, int64_t begin, int64_t end, float* out, const float* value, int64_t value_row) const {
    int64_t first = begin / terms;
    const float* p = along_rows(w.tile, key_block, rows, begin / 16 * 16, padded(end), w.tile);
    TileProduct{p + first,
                key_block,
                1,
                value + first * value_row,
                value_row,
                out,
                padded(job.value_width),
                entries(end) - first,
                1,
                Start::scaled,
                w.factor}
        .run(rows, padded(job.value_width));
  }

  void tile(const Tile& t, const Band& band, const float* query, float* out, float* tops, float* totals,
            const float* value, int64_t value_row) const {
    int64_t from = t.from();
    TileProduct{query,    row_entries(job.width), 1,         w.key + from, key_block, t.x + from,
                t.stride, entries(job.width),     job.scale, Start::zero,  nullptr}
        .run(t.rows, t.to() - from);
    if (weigh(t, band, tops, totals, w.factor)) add_values(t.rows, t.begin, t.end, out, value, value_row);
  }

  // sums: a row of the output without its norm
  void finish(const Place& home, const float* sums, float top, float total) const {
    V norm = S::set(total == 0 ? 0 : 1 / total);
    rows_of.write(job.out, home, sums, job.value_width, norm);
    if (job.rest.data) rows_of.write_lost(job.rest, job.out, home, sums, job.value_width, norm);
    float* stats = job.stats + home.b * job.stats_batch + home.head * job.stats_head + home.row;
    stats[0] = top == minus_infinity<float>() && total == 0 ? 0 : top;  // nothing took part
    stats[job.stats_plane] = total;
  }

  // the same for one split of the keys
  void finish_part(int64_t split, const Place& home, const float* sums, float top, float total) const {
    if (job.splits == 1) return finish(home, sums, top, total);
    float* part = part_of(split, home.b * job.stats_batch + home.head * job.stats_head + home.row);
    part[0] = top;
    part[1] = total;
    for (int64_t i = 0; i < padded(job.value_width); i += S::width) S::store(part + 2 + i, S::load(sums + i));
  }

  float* part_of(int64_t split, int64_t row) const {
    return job.parts + (split * job.stats_plane + row) * (2 + padded(job.value_width));
  }

  // What the splits have found of a row, put together in w.
  void merge(int64_t row) const {
    const Place home = place_of(job, row);
    float top = minus_infinity<float>();
    for (int64_t split = 0; split < job.splits; ++split) {
      float of_part = part_of(split, row)[0];
      top = of_part > top ? of_part : top;
    }
    V base = finite(S::set(top)), total{};
    clear(1, padded(job.value_width));
    for (int64_t split = 0; split < job.splits; ++split) {
      const float* part = part_of(split, row);
      V factor = exp<S>(S::set(part[0]) - base);
      total = total + S::set(part[1]) * factor;
      for (int64_t i = 0; i < padded(job.value_width); i += S::width) {
        S::store(w.out + i, S::load(w.out + i) + S::load(part + 2 + i) * factor);
      }
    }
    float lanes[S::width];
    S::store(lanes, total);
    finish(home, w.out, top, lanes[0]);
  }

  // nothing yet, of n rows
  void clear(int64_t n, int64_t out_row) const {
    for (int64_t i = 0; i < n; ++i) w.top[i] = minus_infinity<float>();
    for (int64_t i = 0; i < n * out_row; i += S::width) S::store(w.out + i, V{});
    for (int64_t i = 0; i < n * S::width; i += S::width) S::store(w.total + i, V{});
  }

  void run(int64_t item) const {
    const auto [b, key_head, first_unit, most] = ForwardItem(job, item);
    const Sequence sequence(job, b);
    const Band band(job, sequence);
    int64_t blocks = blocks_of(sequence.queries), width = row_entries(job.width);
    int64_t value_width = padded(job.value_width);
    int64_t units = min(most, blocks * job.group - first_unit);  // a packed sequence may be shorter than the longest
    if (units <= 0) return;

    struct Unit {
      int64_t head, query, rows;
    } unit[most_units];
    int64_t first_key = sequence.keys, last_key = 0;
    for (int64_t u = 0; u < units; ++u) {
      int64_t query = (first_unit + u) % blocks * query_block;
      unit[u] = {key_head * job.group + (first_unit + u) / blocks, query, min(query_block, sequence.queries - query)};
      first_key = min(first_key, band.first(query));
      last_key = max(last_key, band.last(query + unit[u].rows - 1));
      rows_of.pack(w.query + u * query_block * width, job.query, {b, unit[u].head, sequence.first_query + query},
                   unit[u].rows, job.width);
    }
    clear(units * query_block, value_width);

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
          value = rows_of.down(job.value, first, w.value, keys, job.value_width, value_row);
        }
        tile(t, band, w.query + u * query_block * width, w.out + u * query_block * value_width, w.top + u * query_block,
             w.total + u * query_block * S::width, value, value_row);
      }
    }
    for (int64_t u = 0; u < units; ++u) {
      for (int64_t r = 0; r < unit[u].rows; ++r) {
        int64_t row = u * query_block + r;
        finish({b, unit[u].head, sequence.first_query + unit[u].query + r}, w.out + row * value_width, w.top[row],
               S::sum(S::load(w.total + row * S::width)));
      }
    }
  }
};

}  // namespace
}  // namespace multimax::MULTIMAX_ISA
