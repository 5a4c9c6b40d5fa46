// Attention's threads under ThreadSanitizer: torch's own pool cannot be watched, so the kernels, which know no torch,
// are shared here by std::thread. Forward and backward with several threads, against one thread bit by bit.
//
//     g++ -std=c++20 -O1 -g -fsanitize=thread -pthread -Icsrc -DMULTIMAX_ISA=baseline csrc/attention/attention.cpp
//         tools/threads.cpp -o build/threads && build/threads
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "attention/attention.h"
#include "attention/plan.h"

namespace multimax {
namespace {

using Floats = std::vector<float>;

struct Case {
  const char* name;
  int64_t batches, heads, group, queries, keys, width;
  bool causal;
};

size_t count(int64_t n) { return static_cast<size_t>(n); }

Floats draw(int64_t n, unsigned seed) {
  Floats values(count(n));
  for (float& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = static_cast<float>(seed >> 8) / static_cast<float>(1 << 23) - 1;
  }
  return values;
}

Heads heads_of(Floats& values, int64_t heads, int64_t length, int64_t width) {
  return {values.data(), heads * length * width, length * width, width};
}

void with_threads(int64_t n, const std::function<void(int64_t)>& work) {
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < n; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
}

struct Memory {
  void* data;
  explicit Memory(int64_t bytes) : data(std::aligned_alloc(64, count((bytes + 63) / 64 * 64 + 64))) {}
  ~Memory() { std::free(data); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
};

// Everything that forward and backward compute, one after the other.
Floats run(const Case& of, int64_t threads) {
  const AttentionKernels& kernels = baseline::attention_kernels;
  const int64_t key_heads = of.heads / of.group, rows = of.batches * of.heads * of.queries;
  const int64_t padded = (of.width + 15) / 16 * 16;
  Floats query = draw(rows * of.width, 1), key = draw(of.batches * key_heads * of.keys * of.width, 2);
  Floats value = draw(of.batches * key_heads * of.keys * of.width, 3), grad_out = draw(rows * of.width, 4);
  Floats params = {0.1f, -0.05f, -0.2f, 0.03f, 0.1f, 0.0f, -0.1f, 0.2f};
  Floats out(query.size()), stats(count(2 * rows)), delta(count(rows)), row_sums(count(2 * rows));
  Floats grad_query(count(rows * padded)), grad_key(key.size()), grad_value(value.size());

  AttentionJob job{};
  job.dtype = DType::f32;
  job.order = 2;
  job.batches = of.batches, job.heads = of.heads, job.group = of.group, job.queries = of.queries, job.keys = of.keys;
  job.width = job.value_width = of.width;
  job.scale = 0.3f;
  job.causal = of.causal;
  job.left = job.right = -1;
  job.params = params.data();
  job.query = heads_of(query, of.heads, of.queries, of.width);
  job.key = heads_of(key, key_heads, of.keys, of.width);
  job.value = heads_of(value, key_heads, of.keys, of.width);
  job.out = heads_of(out, of.heads, of.queries, of.width);
  job.stats = stats.data();
  job.stats_batch = of.heads * of.queries, job.stats_head = of.queries, job.stats_plane = rows;
  plan_forward(job, threads);
  Floats parts(count(job.splits * rows * (2 + padded)));
  job.parts = parts.data();
  Stretches stretches(kernels.forward_items(job), forward_stretches(job, threads));
  with_threads(threads, [&](int64_t thread) {
    Memory scratch(kernels.scratch_bytes(job, false));
    for (int64_t item = stretches.take(thread); item >= 0; item = stretches.take(thread)) {
      kernels.forward(job, item, item + 1, scratch.data);
    }
  });
  if (job.few_queries() && job.splits > 1) {
    Memory scratch(kernels.scratch_bytes(job, false));
    kernels.merge(job, 0, rows, scratch.data);
  }

  job.grad_out = heads_of(grad_out, of.heads, of.queries, of.width);
  job.grad_key = heads_of(grad_key, key_heads, of.keys, of.width);
  job.grad_value = heads_of(grad_value, key_heads, of.keys, of.width);
  job.grad_query = grad_query.data();
  job.row_sums = row_sums.data();
  kernels.delta(job, nullptr, delta.data(), 0, rows);
  job.delta = delta.data();
  job.owner_batches = job.owner_key_heads = 1;
  job.owners = of.batches * key_heads;
  plan_backward(job);
  const int64_t blocks = job.owners * job.items_of_owner();
  std::vector<double> sums(count(blocks * job.sets_of_item() * 4 * job.order));
  std::vector<Passed> turns(count(blocks));
  job.sums = sums.data();
  job.turns = turns.data();
  Items queue(job.owners, job.items_of_owner(), threads);
  with_threads(threads, [&](int64_t thread) {
    Memory scratch(kernels.scratch_bytes(job, true));
    int64_t owner = -1;
    for (int64_t item = queue.take(thread, owner); item >= 0; item = queue.take(thread, owner)) {
      kernels.backward(job, item, item + 1, scratch.data);
    }
  });

  Floats all;
  for (const Floats* part : {&out, &stats, &grad_query, &grad_key, &grad_value, &row_sums}) {
    all.insert(all.end(), part->begin(), part->end());
  }
  for (double sum : sums) all.push_back(static_cast<float>(sum));
  return all;
}

int compare() {
  const Case cases[] = {{"one head, many blocks of keys", 1, 1, 1, 200, 700, 16, false},
                        {"causal", 1, 2, 1, 300, 300, 20, true},
                        {"shared key heads", 2, 4, 2, 100, 260, 16, false},
                        {"few queries", 1, 2, 1, 3, 2500, 16, false}};
  int wrong = 0;
  for (const Case& of : cases) {
    const Floats expected = run(of, 1);
    for (int64_t threads : {2, 5}) {
      const Floats found = run(of, threads);
      const bool same = std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)) == 0;
      std::printf("%s, %d threads: %s\n", of.name, static_cast<int>(threads), same ? "equal" : "DIFFERENT");
      wrong += !same;
    }
  }
  return wrong;
}

}  // namespace
}  // namespace multimax

int main() { return multimax::compare() == 0 ? 0 : 1; }
