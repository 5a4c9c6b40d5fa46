// How evenly work divides among threads: for each case and number of threads, what the busiest thread has to do over
// the mean. The division is the library's own; who is how fast is not in it, nor memory. A unit of work is a score or
// an entry.
//
//     g++ -std=c++20 -O2 -Icsrc tools/division.cpp -o build/division && build/division
#include "attention/division.h"

#include <cstdio>
#include <queue>
#include <string>

#include "attention/plan.h"
#include "attention/tile.h"
#include "loss/loss.h"
#include "rows/rows.h"

namespace multimax {
namespace {

const std::vector<int64_t> thread_counts = {2, 16, 64, 192};

using Band = MULTIMAX_ISA::Band;
using Sequence = MULTIMAX_ISA::Sequence;

// Scores of a block of queries with keys [first, last).
double scores(const Band& band, int64_t query, int64_t queries, int64_t first, int64_t last) {
  double count = 0;
  for (int64_t i = query; i < min(query + query_block, queries); ++i) {
    count += static_cast<double>(max(min(last, band.last(i)) - max(first, band.first(i)), 0));
  }
  return count;
}

// Threads by the time at which they are free.
struct Threads {
  struct Free {
    double at;
    int64_t thread;
    int64_t owner;  // where it was
    bool operator<(const Free& other) const { return at > other.at; }
  };
  std::priority_queue<Free> free;
  double work = 0, end = 0;

  explicit Threads(int64_t n) {
    for (int64_t i = 0; i < n; ++i) free.push({0, i, -1});
  }
  Free next() {
    Free thread = free.top();
    free.pop();
    return thread;
  }
  void busy(const Free& thread) {
    end = std::max(end, thread.at);
    free.push(thread);
  }
};

double share(const Threads& threads, int64_t n) { return threads.end * static_cast<double>(n) / threads.work; }

struct Case {
  const char* name;
  int64_t batches, heads, queries, keys;
  bool causal;

  AttentionJob job() const {
    AttentionJob job{};
    job.batches = batches, job.heads = heads, job.group = 1, job.queries = queries, job.keys = keys;
    job.width = job.value_width = 64;
    job.causal = causal;
    job.left = job.right = -1;
    job.owners = batches * heads, job.owner_batches = job.owner_key_heads = 1;
    return job;
  }

  double forward(int64_t n, int64_t& items) const {
    AttentionJob job = this->job();
    plan_forward(job, n);
    items = ForwardItem::count(job);
    const Sequence sequence(job, 0);
    const Band band(job, sequence);
    const int64_t workers = workers_for(job, items, n);
    Threads threads(workers);
    Stretches stretches(items, forward_stretches(job, workers));
    for (int64_t left = items; left > 0; --left) {
      Threads::Free thread = threads.next();
      const int64_t i = stretches.take(thread.thread);
      double work = 0;
      if (job.few_queries()) {
        int64_t first = i % job.splits * job.split_keys;
        work = scores(band, 0, queries, first, min(first + job.split_keys, keys));
      } else {
        const ForwardItem item(job, i);
        for (int64_t u = item.first_unit; u < item.first_unit + item.units; ++u) {
          work += scores(band, u % ceil_div(queries, query_block) * query_block, queries, 0, keys);
        }
      }
      thread.at += work;
      threads.work += work;
      threads.busy(thread);
    }
    return share(threads, n);
  }

  double backward(int64_t n, int64_t& items) const {
    AttentionJob job = this->job();
    plan_backward(job);
    items = job.owners * job.items_of_owner();
    const Sequence sequence(job, 0);
    const Band band(job, sequence);
    const int64_t workers = workers_for(job, items, n);
    Threads threads(workers);
    Items queue(job.owners, job.items_of_owner(), workers);
    int64_t blocks = ceil_div(queries, query_block);
    // when each owner's latest item has passed each block of queries
    std::vector<std::vector<double>> passed(static_cast<size_t>(job.owners),
                                            std::vector<double>(static_cast<size_t>(blocks)));
    for (int64_t left = items; left > 0; --left) {
      Threads::Free thread = threads.next();
      int64_t item = queue.take(thread.thread, thread.owner);
      int64_t block = job.items_of_owner() - 1 - item % job.items_of_owner();  // late keys first
      int64_t first = block * key_block_backward, last = job.blocks_together ? keys : first + key_block_backward;
      for (int64_t q = 0; q < blocks; ++q) {
        double work = scores(band, q * query_block, queries, first, min(last, keys));
        double& before = passed[static_cast<size_t>(thread.owner)][static_cast<size_t>(q)];
        thread.at = before = std::max(thread.at, before) + work;
        threads.work += work;
      }
      threads.busy(thread);
    }
    return share(threads, n);
  }
};

const Case cases[] = {
    {"(1, 1, 16384, 64)", 1, 1, 16384, 16384, false},     {"(1, 1, 16384, 64), causal", 1, 1, 16384, 16384, true},
    {"(1, 8, 4096, 64)", 1, 8, 4096, 4096, false},        {"(1, 8, 4096, 64), causal", 1, 8, 4096, 4096, true},
    {"(64, 12, 197, 64)", 64, 12, 197, 197, false},       {"(1, 8, 1, 64), 4096 keys", 1, 8, 1, 4096, false},
    {"(1, 8, 1, 64), 32768 keys", 1, 8, 1, 32768, false},
};

// Rows: torch gives each thread as many blocks as the others, one after the other.
struct RowsCase {
  const char* name;
  int64_t rows, length;

  double share(int64_t n, int64_t& items) const {
    RowKernels kernels{};  // of float32 with AVX-512
    kernels.width = 16, kernels.short_length = 48, kernels.stretch = 512;
    RowJob job{};
    job.length = length;
    job.columns = length <= kernels.short_length;
    job.items = job.run_items = job.columns ? ceil_div(rows, kernels.width) : rows;
    divide(job, kernels);
    items = job.blocks();
    const double block = static_cast<double>(job.stretches > 1 ? job.stretch : job.block_items * length);
    const double total = static_cast<double>(job.columns ? job.items * length : rows * length);
    constexpr int64_t grain = 2;
    const int64_t workers = std::min(n, ceil_div(items, grain));
    return static_cast<double>(ceil_div(items, workers)) * block * static_cast<double>(n) / total;
  }
};

const RowsCase rows_cases[] = {
    {"(1, 10000000)", 1, 10000000}, {"(1000000, 16)", 1000000, 16}, {"(8192, 1000)", 8192, 1000}};

// Logits of a call, such as a chunk of a linear layer's. Their items go in equal numbers to the threads, in order, as
// torch's parallel_for divides a range.
struct LossCase {
  const char* name;
  int64_t rows, classes;

  double share(int64_t n, int64_t& items) const {
    LossJob job{};
    job.rows = rows, job.classes = classes;
    items = job.items();
    const int64_t parts = job.parts(), together = ceil_div(items, std::min(n, items));
    double most = 0;
    for (int64_t first = 0; first < items; first += together) {
      double work = 0;
      for (int64_t i = first; i < min(first + together, items); ++i) {
        const int64_t row = i / parts * job.item_rows(), entry = i % parts * LossJob::part_entries;
        const int64_t entries = parts == 1 ? classes : min(LossJob::part_entries, classes - entry);
        work += static_cast<double>(min(job.item_rows(), rows - row) * entries);
      }
      most = std::max(most, work);
    }
    return most * static_cast<double>(n) / static_cast<double>(rows * classes);
  }
};

const LossCase loss_cases[] = {
    {"(256, 32000)", 256, 32000},     {"(512, 32000)", 512, 32000}, {"(4096, 32000)", 4096, 32000},
    {"(512, 128256)", 512, 128256},   {"(8, 128256)", 8, 128256},   {"(64, 128256)", 64, 128256},
    {"(100000, 1000)", 100000, 1000},
};

template <class F>
void row(const std::string& name, F share) {
  std::printf("| %s |", name.c_str());
  for (int64_t n : thread_counts) {
    int64_t items = 0;
    double found = share(n, items);
    std::printf(" %.2f (%lld) |", found, static_cast<long long>(items));
  }
  std::printf("\n");
}

}  // namespace
}  // namespace multimax

int main() {
  using namespace multimax;
  std::printf("| busiest thread over the mean (items) |");
  for (int64_t n : thread_counts) std::printf(" %lld threads |", static_cast<long long>(n));
  std::printf("\n|---|---|---|---|---|\n");
  for (const Case& c : cases) {
    row("attention forward " + std::string(c.name), [&](int64_t n, int64_t& items) { return c.forward(n, items); });
    if (c.queries == 1) continue;
    row("attention backward " + std::string(c.name), [&](int64_t n, int64_t& items) { return c.backward(n, items); });
  }
  for (const RowsCase& c : rows_cases) {
    row("rows " + std::string(c.name), [&](int64_t n, int64_t& items) { return c.share(n, items); });
  }
  for (const LossCase& c : loss_cases) {
    row("loss " + std::string(c.name), [&](int64_t n, int64_t& items) { return c.share(n, items); });
  }
}
