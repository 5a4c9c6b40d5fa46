// The attention kernels. Compiled once for each instruction set, as rows.cpp is, and by the same rule.
//
// Scores exist only as tiles of query_block x key_block. All products run in float32, whatever the tensors' type.
#include "attention.h"

#include "memory.h"
#include "multimax_math.h"
#include "product.h"

namespace multimax::MULTIMAX_ISA {
namespace {

using S = Simd<float>;
using V = S::V;

constexpr int64_t query_block = 48;  // a multiple of a product's block of rows
constexpr int64_t key_block = 128;   // keys of a tile, forward; a tile fits the first-level cache
constexpr int64_t key_block_backward = 64;
constexpr int64_t item_units = 10;  // blocks of queries that a packed block of keys serves, forward

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

inline V lowest() { return S::set(minus_infinity<float>()); }
// scores at or below half of float32's lowest value count as masked
constexpr float score_floor = -0x1.fffffep126f;

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
  // of rows [begin, end)
  int64_t first_of(int64_t begin) const { return first(begin); }
  int64_t last_of(int64_t end) const { return last(end - 1); }
};

template <class T>
inline T* row_of(const Heads& m, int64_t b, int64_t h, int64_t i) {
  return static_cast<T*>(m.data) + b * m.batch + h * m.head + i * m.row;
}

// n entries to a row of float32, times a factor, and zeros up to the row's padded width
template <class T>
inline void widen_row(float* to, const T* from, int64_t n, V factor) {
  using M = Memory<S, T>;
  int64_t i = 0;
  for (; i + S::width <= n; i += S::width) S::store(to + i, M::load(from + i) * factor);
  if (i < n) S::store(to + i, M::load(from + i, static_cast<int>(n - i)) * factor), i += S::width;
  for (; i < padded(n); i += S::width) S::store(to + i, V{});
}

template <class T>
inline void narrow_row(T* to, const float* from, int64_t n, V factor) {
  using M = Memory<S, T>;
  int64_t i = 0;
  for (; i + S::width <= n; i += S::width) M::store(to + i, S::load(from + i) * factor);
  if (i < n) M::store(to + i, S::load(from + i) * factor, static_cast<int>(n - i));
}

// what rounding took in narrow_row
template <class T>
inline void lost_row(T* to, const T* rounded, const float* from, int64_t n, V factor) {
  using M = Memory<S, T>;
  int64_t i = 0;
  for (; i + S::width <= n; i += S::width) M::store(to + i, S::load(from + i) * factor - M::load(rounded + i));
  int left = static_cast<int>(n - i);
  if (left) M::store(to + i, S::load(from + i) * factor - M::load(rounded + i, left), left);
}

// rows of a matrix as float32, padded; those beyond the matrix's end are zero
template <class T>
void pack(float* to, int64_t to_row, const T* from, int64_t from_row, int64_t rows, int64_t all_rows, int64_t width,
          float factor) {
  for (int64_t i = 0; i < rows; ++i) widen_row(to + i * to_row, from + i * from_row, width, S::set(factor));
  for (int64_t i = rows; i < all_rows; ++i) {
    for (int64_t j = 0; j < padded(width); j += S::width) S::store(to + i * to_row + j, V{});
  }
}

#if defined(__AVX512F__)
// 16 x 16, in four rounds of exchanges
inline void transpose_block(float* to, int64_t to_row, const float* from, int64_t from_row) {
  __m512 r[16], t[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_ps(from + i * from_row);
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    _mm512_storeu_ps(to + i * to_row, _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88));
    _mm512_storeu_ps(to + (i + 8) * to_row, _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd));
    _mm512_storeu_ps(to + (i + 4) * to_row, _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88));
    _mm512_storeu_ps(to + (i + 12) * to_row, _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd));
  }
}
#else
inline void transpose_block(float* to, int64_t to_row, const float* from, int64_t from_row) {
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) to[i * to_row + j] = from[j * from_row + i];
  }
}
#endif

// to[d][k] = from[k][d]; both dims multiples of 16
inline void transpose(float* to, int64_t to_row, const float* from, int64_t from_row, int64_t rows, int64_t columns) {
  for (int64_t k = 0; k < rows; k += 16) {
    for (int64_t d = 0; d < columns; d += 16) {
      transpose_block(to + d * to_row + k, to_row, from + k * from_row + d, from_row);
    }
  }
}

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

inline float mask_floor(ScoreType type) {
  switch (type) {
    case ScoreType::bf16:
      return -0x1.fep126f;
    case ScoreType::f16:
      return -32752.0f;
    default:
      return score_floor;
  }
}

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
  t.begin = max(band.first_of(t.query) - t.key, 0);
  t.end = min(band.last_of(t.query + t.rows) - t.key, block_keys);
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
    V floor = S::set(mask_floor(m.type));
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
    V floor = S::set(mask_floor(m.type));
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
    V floor = S::set(mask_floor(m.type));
    for (int64_t r = 0; r < t.rows; ++r) {
      int64_t at = t.b * m.batch + t.head * m.head + (t.query + r) * m.row + t.key * m.column;
      float* row = s + r * t.stride;
      for (int64_t c = t.from(); c < t.to(); c += S::width) {
        V mask = load_scores<T>(m, at, c, t.end);
        V own = S::load(row + c);
        // what was masked before stays so, whatever is added
        auto off = S::either(S::le(mask, floor), S::le(own, lowest()));
        S::store(row + c, S::select(off, lowest(), own + mask));
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

template <int N>
Vectors<S, N> params_of(const AttentionJob& job, int64_t head) {
  const float* set = job.params + head * job.set_of_head * 4 * job.order;
  return Vectors<S, N>({job.order, set, set + job.order, set + 2 * job.order, set + 3 * job.order});
}

// Memory of one thread, taken piece by piece.
struct Pieces {
  char* base;
  int64_t bytes = 0;

  template <class T>
  T* take(int64_t n) {
    T* p = reinterpret_cast<T*>(base + bytes);
    // one line between pieces, so that rows of different ones do not all fall on the same cache sets
    bytes += (n * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64 + 64;
    return p;
  }
};

struct ForwardScratch {
  float *query, *out, *top, *total, *key, *key_rows, *value, *tile, *factor;
  int64_t bytes;

  ForwardScratch(const AttentionJob& job, void* memory) {
    Pieces pieces{static_cast<char*>(memory)};
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

// Keys of a block, transposed: to (width, block).
template <class T>
void pack_transposed(float* to, int64_t to_row, float* rows, const T* from, int64_t from_row, int64_t keys,
                     int64_t width, float factor) {
  for (int64_t k = 0; k < padded(keys); k += 16) {
    pack(rows, padded(width), from + k * from_row, from_row, min(16, keys - k), 16, width, factor);
    transpose(to + k, to_row, rows, padded(width), 16, padded(width));
  }
}

// The rows of a matrix as a product takes them: in place if they are float32 of a fitting width, else packed.
template <class T>
inline const float* rows_or_pack(const T* from, int64_t from_row, float* buffer, int64_t rows, int64_t width,
                                 int64_t& row) {
  if constexpr (same<T, float>) {
    if (width % 16 == 0) {
      row = from_row;
      return from;
    }
  }
  row = padded(width);
  pack(buffer, row, from, from_row, rows, rows, width, 1.0f);
  return buffer;
}

// Blocks of queries are counted over the heads of a group: unit = (head in group, block).
inline int64_t blocks_of(int64_t queries) { return ceil_div(queries, query_block); }
inline int64_t items_of_group(const AttentionJob& job) {
  return ceil_div(blocks_of(job.queries) * job.group, item_units);
}

inline int64_t forward_items(const AttentionJob& job) { return job.batches * job.key_heads() * items_of_group(job); }

template <class T, int N>
struct Forward {
  const AttentionJob& job;
  const ForwardScratch& w;

  // x -> s = sigma(x), and the row's largest
  void modulate(const Tile& t, const Vectors<S, N>& params, float* largest) const {
    const Vectors<S, N> f = params;
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

  void tile(Tile& t, const Band& band, const Vectors<S, N>& f, const float* query, float* out, float* tops,
            float* totals, const float* value, int64_t value_row) const {
    int64_t width = padded(job.width), from = t.from();
    Product<S>{query, width, 1, w.key + from, key_block, t.x + from, t.stride, job.width, Start::zero, nullptr}.run(
        t.rows, t.to() - from);
    float largest[query_block];
    add_bias(job, t);
    modulate(t, f, largest);
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
      T* home = row_of<T>(job.out, b, head, row);
      narrow_row(home, out + r * padded(job.value_width), job.value_width, S::set(norm));
      if (job.rest.data) {
        lost_row(row_of<T>(job.rest, b, head, row), home, out + r * padded(job.value_width), job.value_width,
                 S::set(norm));
      }
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
      first_key = min(first_key, band.first_of(query));
      last_key = max(last_key, band.last_of(query + unit[u].rows));
      pack(w.query + u * query_block * width, width,
           row_of<const T>(job.query, b, unit[u].head, sequence.first_query + query), job.query.row, unit[u].rows,
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
          pack_transposed(w.key, key_block, w.key_rows, row_of<const T>(job.key, b, key_head, sequence.first_key + key),
                          job.key.row, keys, job.width, 1.0f);
          value = rows_or_pack(row_of<const T>(job.value, b, key_head, sequence.first_key + key), job.value.row,
                               w.value, keys, job.value_width, value_row);
        }
        tile(t, band, params_of<N>(job, unit[u].head), w.query + u * query_block * width,
             w.out + u * query_block * value_width, w.top + u * query_block, w.total + u * query_block * S::width,
             value, value_row);
      }
    }
    for (int64_t u = 0; u < units; ++u) {
      finish(b, unit[u].head, unit[u].query, unit[u].rows, sequence, w.out + u * query_block * value_width,
             w.top + u * query_block, w.total + u * query_block * S::width);
    }
  }
};

struct BackwardScratch {
  float *query, *grad_out, *key, *key_rows, *value, *rows, *grad_key, *grad_value, *x, *p, *ds, *dropped, *slopes;
  V* lanes;
  double* folded;  // (sets, 4 order, width)
  int64_t bytes;

  BackwardScratch(const AttentionJob& job, void* memory) {
    Pieces pieces{static_cast<char*>(memory)};
    constexpr int64_t tile = query_block * key_block_backward;
    int64_t width = padded(job.width), value_width = padded(job.value_width);
    query = pieces.take<float>(query_block * width);
    grad_out = pieces.take<float>(query_block * value_width);
    key = pieces.take<float>(key_block_backward * width);
    key_rows = pieces.take<float>(key_block_backward * width);
    value = pieces.take<float>(key_block_backward * value_width);
    rows = pieces.take<float>(16 * max(width, value_width));
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

template <class T, int N>
struct Backward {
  const AttentionJob& job;
  const BackwardScratch& w;

  static constexpr int64_t stride = key_block_backward;

  // p = exp(s - top) / total; false if all of them are 0
  bool weights(const Tile& t, const Band& band, const Vectors<S, N>& params, const float* tops, int64_t plane) const {
    const Vectors<S, N> f = params;
    const V floor = S::set(score_floor);
    const int64_t from = t.from(), to = t.to();
    const bool masks = t.edge || job.mask.type != ScoreType::none;
    auto any = S::first(0);
    auto weight = [&](V s, int64_t r, float* p) __attribute__((always_inline)) {
      float total = tops[r + plane];
      V e = exp<S>(s - S::set(tops[r])) * S::set(total == 0 ? 0 : 1 / total);
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
          weight(s, r, p + c);
        }
      }
    }
    if (masks) {
      apply_mask(job, t, band, w.p);
      for (int64_t r = 0; r < t.rows; ++r) {
        for (int64_t c = from; c < to; c += S::width) {
          weight(S::load(w.p + r * stride + c), r, w.p + r * stride + c);
        }
      }
    }
    return S::any(any);
  }

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

  Vectors<S, N> slopes_of(int64_t head) const {
    const float* set = job.params + head * job.set_of_head * 4 * job.order;
    for (int i = 0; i < 2 * job.order; ++i) w.slopes[i] = set[i] * static_cast<float>(i % job.order + 1);
    return Vectors<S, N>({job.order, w.slopes, w.slopes + job.order, set + 2 * job.order, set + 3 * job.order});
  }

  // ds holds the gradient of p; it becomes that of x, and the parameters' sums grow
  template <bool WithParams>
  void scores(const Tile& t, const Vectors<S, N>& slope_params, const float* delta, double* folded,
              float* row_sums) const {
    const Vectors<S, N> slopes = slope_params;
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

  void tile(Tile& t, const Band& band, const Sequence& sequence, int64_t chunk, double* folded) const {
    int64_t width = padded(job.width), value_width = padded(job.value_width), from = t.from(), columns = t.to() - from;
    int64_t keys = t.end - t.begin, row = sequence.first_query + t.query;
    int64_t at = t.b * job.stats_batch + t.head * job.stats_head + row;
    pack(w.query, width, row_of<const T>(job.query, t.b, t.head, row), job.query.row, t.rows, t.rows, job.width,
         job.scale);
    Product<S>{w.query, width, 1, w.key + from, stride, t.x + from, stride, job.width, Start::zero, nullptr}.run(
        t.rows, columns);
    add_bias(job, t);
    if (!weights(t, band, params_of<N>(job, t.head), job.stats + at, job.stats_plane)) return;

    int64_t out_row;
    const float* grad_out = rows_or_pack(row_of<const T>(job.grad_out, t.b, t.head, row), job.grad_out.row, w.grad_out,
                                         t.rows, job.value_width, out_row);
    Product<S>{grad_out, out_row, 1, w.value + from, stride, w.ds + from, stride, job.value_width, Start::zero, nullptr}
        .run(t.rows, columns);
    if (job.dropout.on) drop(t);
    const float* p = job.dropout.on ? w.dropped : w.p;
    Product<S>{p + t.begin, 1,      stride,     grad_out, out_row, w.grad_value + t.begin * value_width,
               value_width, t.rows, Start::add, nullptr}
        .run(keys, value_width);

    const Vectors<S, N> slopes = slopes_of(t.head);
    if (job.sums != nullptr) {
      scores<true>(t, slopes, job.delta + at, folded, job.row_sums + chunk * 2 * job.stats_plane + at);
    } else {
      scores<false>(t, slopes, job.delta + at, folded, nullptr);
    }
    if (job.grad_bias.data != nullptr) add_to_bias(t);
    Product<S>{w.ds + t.begin, 1,      stride,     w.query, width, w.grad_key + t.begin * width,
               width,          t.rows, Start::add, nullptr}
        .run(keys, width);
    Product<S>{w.ds + t.begin,
               stride,
               1,
               w.key_rows + t.begin * width,
               width,
               job.grad_query + chunk * job.grad_query_chunk + at * width,
               width,
               keys,
               Start::add,
               nullptr}
        .run(t.rows, width);
  }

  // Blocks of keys of one chunk, for one batch and key head.
  void run(int64_t b, int64_t key_head, int64_t chunk, double* folded, int64_t first_head) const {
    const Sequence sequence(job, b);
    const Band band(job, sequence);
    int64_t width = padded(job.width), value_width = padded(job.value_width);
    int64_t last_key = min((chunk + 1) * job.chunk_keys, sequence.keys);
    for (int64_t key = chunk * job.chunk_keys; key < last_key; key += stride) {
      int64_t keys = min(stride, last_key - key);
      const T* key_at = row_of<const T>(job.key, b, key_head, sequence.first_key + key);
      const T* value_at = row_of<const T>(job.value, b, key_head, sequence.first_key + key);
      bool packed = false;
      for (int64_t i = 0; i < stride * width; i += S::width) S::store(w.grad_key + i, V{});
      for (int64_t i = 0; i < stride * value_width; i += S::width) S::store(w.grad_value + i, V{});
      for (int64_t head = key_head * job.group; head < (key_head + 1) * job.group; ++head) {
        double* own = folded + (job.set_of_head ? head - first_head : 0) * 4 * job.order * S::width;
        for (int64_t query = 0; query < sequence.queries; query += query_block) {
          Tile t{b, head, query, min(query_block, sequence.queries - query), key, 0, 0, false, w.x, stride};
          if (!clip(t, band, keys) || !any_left(job, t)) continue;
          if (!packed) {
            packed = true;
            pack_transposed(w.key, stride, w.rows, key_at, job.key.row, keys, job.width, 1.0f);
            pack_transposed(w.value, stride, w.rows, value_at, job.value.row, keys, job.value_width, 1.0f);
            pack(w.key_rows, width, key_at, job.key.row, keys, keys, job.width, job.scale);
          }
          tile(t, band, sequence, chunk, own);
        }
      }
      for (int64_t k = 0; k < keys; ++k) {
        int64_t row = sequence.first_key + key + k;
        narrow_row(row_of<T>(job.grad_key, b, key_head, row), w.grad_key + k * width, job.width, S::set(1));
        narrow_row(row_of<T>(job.grad_value, b, key_head, row), w.grad_value + k * value_width, job.value_width,
                   S::set(1));
      }
    }
  }

  void run(int64_t item) const {
    int64_t owner = item / job.chunks, chunk = item % job.chunks;
    int64_t across = job.key_heads() / job.owner_key_heads;
    int64_t first_batch = owner / across * job.owner_batches, first_key_head = owner % across * job.owner_key_heads;
    int64_t all = job.sums ? job.sets_of_item() * 4 * job.order : 0;
    for (int64_t i = 0; i < all * S::width; ++i) w.folded[i] = 0;
    for (int64_t b = first_batch; b < first_batch + job.owner_batches; ++b) {
      for (int64_t k = first_key_head; k < first_key_head + job.owner_key_heads; ++k) {
        run(b, k, chunk, w.folded, first_key_head * job.group);
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
  const Vectors<S, N> slopes = Backward<float, N>{job, w}.slopes_of(line % job.heads);
  for (int j = 0; j < 4 * job.order; ++j) w.lanes[j] = V{};
  for (int64_t i = 0; i < job.stats_head; i += S::width) {
    int n = static_cast<int>(min(S::width, job.stats_head - i));
    int64_t row = line * job.stats_head + i;
    V left{}, mean{};
    for (int64_t chunk = 0; chunk < job.chunks; ++chunk) {
      const float* sums = job.row_sums + chunk * 2 * job.stats_plane + row;
      left = left + S::load(sums, n);
      mean = mean + S::load(sums + job.stats_plane, n);
    }
    if (grad_lse) left = left - S::load(grad_lse + row, n);
    left = S::zero_if(S::le(S::load(job.stats + job.stats_plane + row, n), V{}), left);  // rows without keys
    sigma_backward<true>(slopes, mean, -left, w.lanes);
  }
  for (int j = 0; j < 4 * job.order; ++j) to[j] = S::sum(w.lanes[j]);
}

void settle(const AttentionJob& job, const float* grad_lse, double* sums, int64_t first, int64_t last, void* memory) {
  const BackwardScratch scratch(job, memory);
  for (int64_t line = first; line < last; ++line) {
    double* to = sums + line * 4 * job.order;
    if (job.order == 1) {
      settle_line<1>(job, scratch, grad_lse, to, line);
    } else if (job.order == 2) {
      settle_line<2>(job, scratch, grad_lse, to, line);
    } else {
      settle_line<0>(job, scratch, grad_lse, to, line);
    }
  }
}

template <template <class, int> class Pass, class Scratch, class T>
void run_items(const AttentionJob& job, int64_t first, int64_t last, void* memory) {
  const Scratch scratch(job, memory);
  for (int64_t item = first; item < last; ++item) {
    if (job.order == 1) {
      Pass<T, 1>{job, scratch}.run(item);
    } else if (job.order == 2) {
      Pass<T, 2>{job, scratch}.run(item);
    } else {
      Pass<T, 0>{job, scratch}.run(item);
    }
  }
}

template <template <class, int> class Pass, class Scratch>
void run_items(const AttentionJob& job, int64_t first, int64_t last, void* memory) {
  if (job.dtype == DType::f32) return run_items<Pass, Scratch, float>(job, first, last, memory);
  if (job.dtype == DType::bf16) return run_items<Pass, Scratch, bf16>(job, first, last, memory);
  run_items<Pass, Scratch, f16>(job, first, last, memory);
}

// Rows in the order of stats: (B, H, Lq), or (H, all rows) if packed.
struct Row {
  int64_t b, head, i;
  Row(const AttentionJob& job, int64_t row) {
    i = row % job.stats_head;
    head = row / job.stats_head % job.heads;
    b = row / job.stats_head / job.heads;
  }
};

template <class T>
void delta(const AttentionJob& job, const float* grad_lse, float* to, int64_t first, int64_t last) {
  using M = Memory<S, T>;
  for (int64_t row = first; row < last; ++row) {
    Row at(job, row);
    const T* g = row_of<const T>(job.grad_out, at.b, at.head, at.i);
    V sum{};
    const Heads parts[] = {job.rest, job.out};
    for (const Heads& part : parts) {
      if (part.data == nullptr) continue;
      const T* a = row_of<const T>(part, at.b, at.head, at.i);
      int64_t i = 0;
      for (; i + S::width <= job.value_width; i += S::width) sum = sum + M::load(a + i) * M::load(g + i);
      int left = static_cast<int>(job.value_width - i);
      if (left) sum = sum + M::load(a + i, left) * M::load(g + i, left);
    }
    to[row] = S::sum(sum) - (grad_lse ? grad_lse[row] : 0);
  }
}

void delta(const AttentionJob& job, const float* grad_lse, float* to, int64_t first, int64_t last) {
  if (job.dtype == DType::f32) return delta<float>(job, grad_lse, to, first, last);
  if (job.dtype == DType::bf16) return delta<bf16>(job, grad_lse, to, first, last);
  delta<f16>(job, grad_lse, to, first, last);
}

template <class T>
void collect(const AttentionJob& job, const Heads& to, int64_t first, int64_t last) {
  int64_t width = padded(job.width);
  for (int64_t row = first; row < last; ++row) {
    Row at(job, row);
    float* sum = job.grad_query + row * width;
    for (int64_t chunk = 1; chunk < job.chunks; ++chunk) {
      const float* other = sum + chunk * job.grad_query_chunk;
      for (int64_t i = 0; i < width; i += S::width) S::store(sum + i, S::load(sum + i) + S::load(other + i));
    }
    T* home = row_of<T>(to, at.b, at.head, at.i);
    if (static_cast<void*>(home) != sum) narrow_row(home, sum, job.width, S::set(1));
  }
}

void collect(const AttentionJob& job, const Heads& to, int64_t first, int64_t last) {
  if (job.dtype == DType::f32) return collect<float>(job, to, first, last);
  if (job.dtype == DType::bf16) return collect<bf16>(job, to, first, last);
  collect<f16>(job, to, first, last);
}

int64_t scratch_bytes(const AttentionJob& job, bool backward) {
  return backward ? BackwardScratch(job, nullptr).bytes : ForwardScratch(job, nullptr).bytes;
}

}  // namespace

const AttentionKernels attention_kernels = {
    forward_items, scratch_bytes, run_items<Forward, ForwardScratch>, delta, run_items<Backward, BackwardScratch>,
    settle,        collect,
};

}  // namespace multimax::MULTIMAX_ISA
