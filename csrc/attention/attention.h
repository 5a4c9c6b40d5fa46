// MultiMax attention: what one call has to do, free of torch.
//
// B batches (or packed sequences), H query heads in groups of `group` that share a key head, Lq queries, Lk keys, D and
// Dv entries per head. For query i and key j
//     x_ij = scale q_i k_j + bias_ij,   s_ij = sigma(x_ij) + mask_ij,   p_i = softmax(s_i),   out_i = sum_j p_ij v_j.
#pragma once

#include <cstdint>

#include "simd/isa.h"

namespace multimax {

// (B, H, L, D) with entries of a row side by side; strides in elements.
struct Heads {
  void* data = nullptr;
  int64_t batch = 0, head = 0, row = 0;
};

enum class ScoreType { none, boolean, f32, bf16, f16 };

// (B, H, Lq, Lk), stride 0 where it is the same for all; columns lie side by side or are all the same.
struct Scores {
  void* data = nullptr;
  ScoreType type = ScoreType::none;
  int64_t batch = 0, head = 0, row = 0, column = 0;
};

struct Dropout {
  bool on;
  uint64_t seed;
  uint32_t below;  // an entry whose hash lies below is dropped
  float scale;     // of those that stay
};

constexpr int64_t query_block = 48;  // a multiple of a product's block of rows
constexpr int64_t key_block = 128;   // keys of a tile, forward; a tile fits the first-level cache
constexpr int64_t key_block_backward = 64;
constexpr int64_t most_units = 10;  // blocks of queries that a packed block of keys serves, forward
constexpr int64_t few_rows = 16;    // few queries: at most so many of the heads that share a key head
constexpr int64_t few_keys = 512;   // and the keys of their tiles

#define MULTIMAX_ALWAYS inline __attribute__((always_inline))
MULTIMAX_ALWAYS int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
MULTIMAX_ALWAYS int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
MULTIMAX_ALWAYS int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
#undef MULTIMAX_ALWAYS

// How many blocks of queries an item of the backward has added its part to. Each on cache lines of its own (processors
// fetch them in pairs): it is written at every block, beside other threads'.
struct alignas(128) Passed {
  int64_t blocks = 0;
};

struct AttentionJob {
  DType dtype;
  int order;
  int64_t batches, heads, group, queries, keys, width, value_width;
  // packed sequences: where each begins, (B + 1) each; rows of all of them follow one another, and batch strides are 0
  const int64_t *query_starts, *key_starts;

  float scale;
  // Key j takes part for query i if j <= i (causal), and if -left <= j - (i + Lk - Lq) <= right; negative: no bound.
  bool causal;
  int64_t left, right;
  Dropout dropout;

  Heads query, key, value, out;
  Heads rest;  // half precision, for the backward: what rounding took from out; null where not needed
  Scores mask, bias;
  const float* params;  // (sets, 4, order): lower, upper coefs, lower, upper knots
  int64_t set_of_head;  // 0: one set for all, 1: one per head

  // (2, rows): each row's largest s and its sum of exp(s - largest); rows are (B, H, Lq), or (H, all rows) if packed
  float* stats;
  int64_t stats_batch, stats_head, stats_plane;

  int64_t item_units;  // forward: blocks of queries that a packed block of keys serves, at most
  bool head_by_head;   // the order of the forward's items; else by queries

  // Few queries: the keys are split, and parts get what each split has found, (splits, rows, 2 + value width padded to
  // 16): largest s, sum of exp(s - largest), and the output without its norm.
  int64_t splits, split_keys;
  float* parts;

  // Backward. An owner has the batches and key heads that share a gradient of the bias. An item has one of its blocks
  // of keys, or, where there are enough owners (blocks_together), all of them.
  Heads grad_out, grad_key, grad_value;
  Scores grad_bias;    // float32, zero before
  const float* delta;  // like a plane of stats: sum of grad_out out, less the gradient of the log-sum
  float* grad_query;   // (rows as in stats, width padded to 16), float32, zero before; scale is applied
  bool blocks_together;
  int64_t owners, owner_batches, owner_key_heads;  // batches and key heads of one owner
  Passed* turns;                                   // (items), zero before: see Turn
  double* sums;  // (items, heads of an owner if set_of_head else 1, 4 order); null where not needed
  // (2, rows as in stats), float32, zero before: each row's sum of ds, and of p x. See settle_line.
  float* row_sums;

  int64_t key_heads() const { return heads / group; }
  // of all heads that share a key head
  bool few_queries() const { return queries * group <= few_rows; }
  int64_t sets_of_item() const { return set_of_head ? owner_key_heads * group : 1; }
  int64_t items_of_owner() const { return blocks_together ? 1 : max(ceil_div(keys, key_block_backward), 1); }
};

struct AttentionKernels {
  int64_t (*forward_items)(const AttentionJob&);
  int64_t (*scratch_bytes)(const AttentionJob&, bool backward);  // that one thread needs, aligned to 64
  void (*forward)(const AttentionJob&, int64_t first_item, int64_t last_item, void* scratch);
  // the splits' outputs put together, for rows [first, last)
  void (*merge)(const AttentionJob&, int64_t first, int64_t last, void* scratch);
  // delta for rows [first, last) of (B, H, Lq): out and grad_out given, grad_lse like a plane of stats or null
  void (*delta)(const AttentionJob&, const float* grad_lse, float* delta, int64_t first, int64_t last);
  // An item of an owner may be computed beside those before it, but not before they have begun.
  void (*backward)(const AttentionJob&, int64_t first_item, int64_t last_item, void* scratch);
  // what has to be added to the parameters' sums, (lines, 4 order); a line is stats_head rows, all of one head
  void (*settle)(const AttentionJob&, const float* grad_lse, double* sums, int64_t first_line, int64_t last_line,
                 void* scratch);
  // the gradient of the query in its dtype, for rows [first, last)
  void (*collect)(const AttentionJob&, const Heads& grad_query, int64_t first, int64_t last);
};

MULTIMAX_DECLARE(AttentionKernels, attention_kernels)

}  // namespace multimax
