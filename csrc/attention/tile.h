// What attention's forward and backward have in common: tiles of scores, and what is left of them.
#pragma once

#include "attention/operands.h"
#include "simd/scratch.h"
#include "simd/sigma.h"

namespace multimax::MULTIMAX_ISA {
namespace {

inline V lowest() { return S::set(minus_infinity<float>()); }
constexpr float score_floor = masked_floor<float>;

// One sequence of queries and of keys.
struct Sequence {
  int64_t queries, keys, first_query, first_key;

  Sequence(const AttentionJob& job, int64_t b) {
    first_query = job.query_starts ? job.query_starts[b] : 0;
    first_key = job.key_starts ? job.key_starts[b] : 0;
    queries = job.query_starts ? job.query_starts[b + 1] - first_query : job.queries;
    keys = job.key_starts ? job.key_starts[b + 1] - first_key : job.keys;
  }
};

// The keys that take part for query i are [first(i), last(i)), neither of which falls as i grows.
struct Band {
  int64_t keys, first_offset, last_offset;

  Band(const AttentionJob& job, const Sequence& sequence) : keys(sequence.keys) {
    int64_t diagonal = sequence.keys - sequence.queries;
    first_offset = job.left < 0 ? -sequence.queries : diagonal - job.left;
    last_offset = job.right < 0 ? sequence.keys : diagonal + job.right + 1;
    if (job.causal) last_offset = min(last_offset, 1);
  }
  int64_t first(int64_t i) const { return min(max(i + first_offset, 0), keys); }
  int64_t last(int64_t i) const { return min(max(i + last_offset, 0), keys); }
};

// Entries [column, column + width) of a row of mask or bias; those from `end` on are not read.
template <class T>
inline V load_scores(const Scores& m, int64_t at, int64_t column, int64_t end) {
  const T* row = static_cast<const T*>(m.data) + at;
  if constexpr (same<T, unsigned char>) {
    if (m.column == 0) return row[0] ? V{} : lowest();
    int n = static_cast<int>(min(end - column, S::width));
#if defined(__AVX512F__)
    __m128i bytes = _mm_maskz_loadu_epi8(S::first(n), row + column);
    return S::select(_mm_test_epi8_mask(bytes, bytes), V{}, lowest());
#else
    S::I on{};
    for (int i = 0; i < n; ++i) on[i] = row[column + i];
    return S::select(on != 0, V{}, lowest());
#endif
  } else {
    using M = Memory<S, T>;
    if (m.column == 0) {
      float lane[S::width];
      S::store(lane, M::load(row, 1));
      return S::set(lane[0]);
    }
    return column + S::width <= end ? M::load(row + column) : M::load(row + column, static_cast<int>(end - column));
  }
}

// of a boolean mask too, which is read as 0 and -inf
template <class T>
constexpr float floor_of_scores = masked_floor<T>;
template <>
constexpr float floor_of_scores<unsigned char> = score_floor;

template <class F>
MULTIMAX_INLINE void with_score_type(ScoreType type, F f) {
  switch (type) {
    case ScoreType::none:
      return;
    case ScoreType::boolean:
      return f.template operator()<unsigned char>();
    case ScoreType::f32:
      return f.template operator()<float>();
    case ScoreType::bf16:
      return f.template operator()<bf16>();
    case ScoreType::f16:
      return f.template operator()<f16>();
  }
}

inline uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// Which entries of a row dropout keeps follows from seed, head, query and key alone: by a hash, so nothing is stored.
struct DropoutRow {
  uint32_t first, second;

  DropoutRow(const Dropout& dropout, int64_t head, int64_t query) {
    uint64_t z = mix(dropout.seed + 0x9e3779b97f4a7c15u * (static_cast<uint64_t>(head) + 1));
    z = mix(z + 0x9e3779b97f4a7c15u * (static_cast<uint64_t>(query) + 1));
    first = static_cast<uint32_t>(z);
    second = static_cast<uint32_t>(z >> 32);
  }
  // scale where key `column` and its neighbours are kept, else 0
  V factor(const Dropout& dropout, int64_t column) const {
    S::U z;
    for (int i = 0; i < S::width; ++i) z[i] = static_cast<uint32_t>(column + i);
    z = z * 0x9e3779b1u ^ first;
    z = (z ^ (z >> 16)) * 0x85ebca6bu + second;
    z = (z ^ (z >> 13)) * 0xc2b2ae35u;
    z = z ^ (z >> 16);
    return reinterpret_cast<V>(reinterpret_cast<S::I>(S::set(dropout.scale)) & (z >= (S::U{} + dropout.below)));
  }
};

// A block of queries of one head, against a block of keys.
struct Tile {
  int64_t b, head, query, rows;  // first query, and how many
  int64_t key, begin, end;       // the block's first key; columns [begin, end) of it take part for some row
  bool edge;                     // not for all rows, or the last vector is not full
  float* x;                      // (query_block, stride)
  int64_t stride;

  // begin and end as whole vectors
  int64_t from() const { return begin / 16 * 16; }
  int64_t to() const { return padded(end); }
};

// Narrows a tile to the band; false if nothing is left.
inline bool clip(Tile& t, const Band& band, int64_t block_keys) {
  t.begin = max(band.first(t.query) - t.key, 0);
  t.end = min(band.last(t.query + t.rows - 1) - t.key, block_keys);
  if (t.begin >= t.end) return false;
  t.edge = t.begin % 16 != 0 || t.end % 16 != 0 || band.first(t.query + t.rows - 1) > t.key + t.begin ||
           band.last(t.query) < t.key + t.end;
  return true;
}

// Whether the mask leaves anything of the tile.
inline bool any_left(const AttentionJob& job, const Tile& t) {
  const Scores& m = job.mask;
  bool left = m.type == ScoreType::none;
  int64_t rows = m.row == 0 ? 1 : t.rows, end = m.column == 0 ? t.begin + 1 : t.end;
  with_score_type(m.type, [&]<class T>() {
    V floor = S::set(floor_of_scores<T>);
    for (int64_t r = 0; r < rows && !left; ++r) {
      int64_t at = t.b * m.batch + t.head * m.head + (t.query + r) * m.row + t.key * m.column;
      for (int64_t c = t.begin; c < end && !left; c += S::width) {
        auto there = S::first(static_cast<int>(min(end - c, S::width)));
        left = S::any(S::both(there, S::not_ge(floor, load_scores<T>(m, at, c, end))));  // above the floor, or NaN
      }
    }
  });
  return left;
}

inline void add_bias(const AttentionJob& job, const Tile& t) {
  const Scores& m = job.bias;
  with_score_type(m.type, [&]<class T>() {
    V floor = S::set(floor_of_scores<T>);
    for (int64_t r = 0; r < t.rows; ++r) {
      int64_t at = t.b * m.batch + t.head * m.head + (t.query + r) * m.row + t.key * m.column;
      float* x = t.x + r * t.stride;
      for (int64_t c = t.from(); c < t.to(); c += S::width) {
        V bias = load_scores<T>(m, at, c, t.end);
        V sum = S::load(x + c) + bias;
        S::store(x + c, S::select(S::le(bias, floor), lowest(), sum));
      }
    }
  });
}

// s += mask where it is given as numbers, -inf where it rules out; -inf outside of the band
inline void apply_mask(const AttentionJob& job, const Tile& t, const Band& band, float* s) {
  const Scores& m = job.mask;
  with_score_type(m.type, [&]<class T>() {
    V floor = S::set(floor_of_scores<T>);
    for (int64_t r = 0; r < t.rows; ++r) {
      int64_t at = t.b * m.batch + t.head * m.head + (t.query + r) * m.row + t.key * m.column;
      float* row = s + r * t.stride;
      for (int64_t c = t.from(); c < t.to(); c += S::width) {
        V mask = load_scores<T>(m, at, c, t.end);
        V score = S::load(row + c);
        // what was masked before stays so, whatever is added
        auto off = S::either(S::le(mask, floor), S::le(score, lowest()));
        S::store(row + c, S::select(off, lowest(), score + mask));
      }
    }
  });
  if (!t.edge) return;
  for (int64_t r = 0; r < t.rows; ++r) {
    int64_t first = band.first(t.query + r) - t.key, last = min(band.last(t.query + r) - t.key, t.end);
    float* row = s + r * t.stride;
    for (int64_t c = t.from(); c < min(first, t.to()); ++c) row[c] = minus_infinity<float>();
    for (int64_t c = max(last, t.from()); c < t.to(); ++c) row[c] = minus_infinity<float>();
  }
}

inline V finite(V top) { return S::select(S::le(top, lowest()), V{}, top); }

inline Params<float> params_of(const AttentionJob& job, int64_t head) {
  const float* set = job.params + head * job.set_of_head * 4 * job.order;
  return {job.order, set, set + job.order, set + 2 * job.order, set + 3 * job.order};
}

// of scratch memory: one line, so that rows of different pieces do not all fall on the same cache sets
constexpr int64_t pieces_gap = 64;

// A row in the order of stats: (B, H, Lq), or (H, all rows) if packed.
inline Place place_of(const AttentionJob& job, int64_t row) {
  return {row / job.stats_head / job.heads, row / job.stats_head % job.heads, row % job.stats_head};
}

// Blocks of queries are counted over the heads of a group: unit = (head in group, block).
inline int64_t blocks_of(int64_t queries) { return ceil_div(queries, query_block); }

}  // namespace
}  // namespace multimax::MULTIMAX_ISA
