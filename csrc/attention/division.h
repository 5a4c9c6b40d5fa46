// What belongs to which item of the forward.
#pragma once

#include "attention/attention.h"

namespace multimax {
namespace {

// Forward: some units, blocks of queries of the heads that share a key head. unit = (head in group, block).
struct ForwardItem {
  int64_t b, key_head, first_unit, units;

  static int64_t of_group(const AttentionJob& job) {
    return ceil_div(ceil_div(job.queries, query_block) * job.group, job.item_units);
  }
  static int64_t count(const AttentionJob& job) {
    return job.batches * job.key_heads() * (job.few_queries() ? job.splits : of_group(job));
  }

  // Late queries first: in a causal call they have most to do, and what is left at the end should be little.
  ForwardItem(const AttentionJob& job, int64_t item) {
    int64_t all = job.batches * job.key_heads(), group = of_group(job);
    int64_t head = job.head_by_head ? item / group : item % all, late = job.head_by_head ? item % group : item / all;
    key_head = head % job.key_heads();
    b = head / job.key_heads();
    first_unit = (group - 1 - late) * job.item_units;
    units = min(job.item_units, ceil_div(job.queries, query_block) * job.group - first_unit);
  }
};

}  // namespace
}  // namespace multimax
