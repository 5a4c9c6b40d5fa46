// How attention's work is divided between threads.
#pragma once

#include <algorithm>
#include <mutex>
#include <vector>

#include "attention/attention.h"

namespace multimax {

// Enough to keep many threads busy to the end: eight for each of 192.
constexpr int64_t enough_items = 1536;

// More threads than this cost more to wake than they help.
inline int64_t most_workers(const AttentionJob& job) {
  // multiplications; few queries wait for memory, which makes each of them longer
  const double worth_waking = job.few_queries() ? 1 << 17 : 1 << 19;
  double scores = static_cast<double>(job.batches * job.heads) * static_cast<double>(job.queries * job.keys);
  double work = scores * static_cast<double>(job.width + job.value_width) / worth_waking;
  return static_cast<int64_t>(std::clamp(work, 1.0, 1e6));
}

inline int64_t workers_for(const AttentionJob& job, int64_t items, int64_t threads) {
  return std::min({items, most_workers(job), threads});
}

// Few queries: splits of the keys, by the shapes alone, so that results do not depend on the number of threads. Others:
// a packed block of keys serves several blocks of queries, as long as that leaves enough items for all threads; results
// do not depend on it.
inline void plan_forward(AttentionJob& job, int64_t threads) {
  constexpr int64_t least_split = 512, block = 128;
  int64_t all = std::max<int64_t>(job.batches * job.key_heads(), 1);
  int64_t splits = std::clamp<int64_t>(ceil_div(enough_items, all), 1, std::max<int64_t>(job.keys / least_split, 1));
  job.split_keys = std::max<int64_t>(ceil_div(ceil_div(job.keys, splits), block) * block, block);
  job.splits = std::max<int64_t>(ceil_div(job.keys, job.split_keys), 1);
  int64_t units = job.batches * job.heads * ceil_div(job.queries, query_block);
  job.item_units = std::clamp<int64_t>(units / (8 * threads), 1, most_units);
  job.head_by_head = job.few_queries() || all >= threads;
}

// Where heads are fewer than threads, whoever is free takes the next item, those with most to do first.
inline int64_t forward_stretches(const AttentionJob& job, int64_t workers) { return job.head_by_head ? workers : 1; }

// Blocks of keys are items of their own where owners are few.
inline void plan_backward(AttentionJob& job) {
  // one number for all keys: what has one gradient has to be added up by one item
  bool shared = job.grad_bias.data != nullptr && job.grad_bias.column == 0;
  job.blocks_together = shared || job.owners >= enough_items;
}

// Hands out [0, n). Each thread begins with a stretch of its own, the same one in forward and backward, and that of
// torch's operations before and after: what it touched last is still in its cache. Then it helps where most is left.
class Stretches {
 public:
  Stretches(int64_t n, int64_t count) : stretches_(static_cast<size_t>(count)) {
    for (int64_t i = 0; i < count; ++i) stretches_[static_cast<size_t>(i)] = {i * n / count, (i + 1) * n / count};
  }

  // Negative if there are none left. Of one stretch, all threads take in order.
  int64_t take(int64_t thread) {
    std::lock_guard lock(mutex_);
    Stretch* from = &stretches_[static_cast<size_t>(thread) % stretches_.size()];
    if (from->left() == 0) {
      from = &*std::max_element(stretches_.begin(), stretches_.end(),
                                [](const Stretch& a, const Stretch& b) { return a.left() < b.left(); });
    }
    return from->left() == 0 ? -1 : from->next++;
  }

 private:
  struct Stretch {
    int64_t next, end;
    int64_t left() const { return end - next; }
  };
  std::vector<Stretch> stretches_;
  std::mutex mutex_;
};

// Hands out the items of the backward. A thread has an owner to itself as long as there are any; what it reads then
// stays in its cache, and it never waits. Then it helps where most is left. The items of an owner come in their order.
class Items {
 public:
  Items(int64_t owners, int64_t of_owner, int64_t threads)
      : of_owner_(of_owner), taken_(static_cast<size_t>(owners)), untouched_(owners, threads) {}

  // The next item for a thread that was at `owner`, negative at first; negative if there are none left.
  int64_t take(int64_t thread, int64_t& owner) {
    std::lock_guard lock(mutex_);
    if (owner < 0 || taken(owner) == of_owner_) {
      owner = untouched_.take(thread);
      if (owner < 0) owner = fullest();
      if (taken(owner) == of_owner_) return -1;
    }
    return owner * of_owner_ + taken_[static_cast<size_t>(owner)]++;
  }

 private:
  int64_t of_owner_;
  std::vector<int64_t> taken_;
  Stretches untouched_;
  std::mutex mutex_;

  int64_t taken(int64_t owner) const { return taken_[static_cast<size_t>(owner)]; }
  int64_t fullest() const { return std::min_element(taken_.begin(), taken_.end()) - taken_.begin(); }
};

}  // namespace multimax
