// Where the items of a call lie: in place where their entries are side by side, else copied.
#pragma once

#include "rows/forward.h"
#include "simd/scratch.h"
#include "simd/transpose.h"

namespace multimax::MULTIMAX_ISA {
namespace {

// Where an item lies: its place on every axis, and the offsets that follow from it.
struct Position {
  int64_t index[max_axes];
  int64_t lane;
  int64_t begin = 0, length;  // of the stretch at hand

  void seek(const RowJob& job, int64_t item, int width) {
    lane = 0;
    length = job.length;
    if (job.columns) {
      int64_t lane_items = (job.lanes + width - 1) / width;
      lane = item % lane_items * width;
      item /= lane_items;
    }
    for (int a = job.axes - 1; a >= 0; --a) {
      index[a] = item % job.sizes[a];
      item /= job.sizes[a];
    }
  }
  void next(const RowJob& job, int width) {
    if (job.columns && (lane += width) < job.lanes) return;
    lane = 0;
    for (int a = job.axes - 1; a >= 0; --a) {
      if (++index[a] < job.sizes[a]) return;
      index[a] = 0;
    }
  }
  int64_t offset(const RowJob& job, const int64_t* strides) const {
    int64_t at = 0;
    for (int a = 0; a < job.axes; ++a) at += index[a] * strides[a];
    return at;
  }
  template <class Entry>
  Entry* in(const RowJob& job, const Operand& operand) const {
    return static_cast<Entry*>(operand.data) + offset(job, operand.strides) + lane * operand.lane_stride +
           begin * operand.length_stride;
  }
};

inline bool side_by_side(const RowJob& job, const Operand& operand) {
  return (job.columns ? operand.lane_stride : operand.length_stride) == 1 || job.length == 1;
}

// What one thread needs beside the tensors themselves.
struct Scratch {
  T *x, *y, *grad, *out;  // (batch, entries) copies of what does not lie side by side
  C* work;                // (batch, entries)
  Measured* measured;     // of a long row
  C* slopes;              // (2, order)
  V* sums;
  double* folded;
  int64_t entries, bytes;
  int batch;

  // long rows: rather than a second array that does not fit the cache
  static bool works_in_place(const RowJob& job) {
    const int64_t vectors = job.columns ? job.length : (job.length + S::width - 1) / S::width;
    return same<T, C> && vectors > segment && (job.stretches == 1 || side_by_side(job, job.out));
  }
  static bool keeps_work(const RowJob& job) { return job.stretches == 1 || works_in_place(job); }

  Scratch(const RowJob& job, void* memory) {
    batch = job.columns ? 1 : static_cast<int>(max(1, min(batch_rows, batch_entries / max(job.length, 1))));
    // a row begins on a cache line, and one line further than its predecessor's end: not at a multiple of 4096 bytes
    const int64_t length = job.stretches == 1 ? job.length : job.stretch;
    entries = job.columns ? length * S::width : (length + 15) / 16 * 16 + 16;
    Pieces pieces(memory);
    auto copies = [&](const Operand& operand) {
      return operand.data == nullptr || side_by_side(job, operand) ? 0 : batch * entries;
    };
    x = pieces.take<T>(job.mask.data == nullptr ? copies(job.x) : batch * entries);
    y = pieces.take<T>(copies(job.y));
    grad = pieces.take<T>(copies(job.grad));
    out = pieces.take<T>(copies(job.out));
    work = pieces.take<C>(works_in_place(job) ? 0 : keeps_work(job) ? batch * entries : segment * S::width);
    measured = pieces.take<Measured>(entries / S::width / (stretch_segments * segment) + 1);
    slopes = pieces.take<C>(2 * job.order);
    sums = pieces.take<V>(4 * job.order);
    folded = pieces.take<double>(4 * job.order * S::width);
    bytes = pieces.bytes;
  }
};

inline void copy(T* to, int64_t to_stride, const T* from, int64_t from_stride, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i * to_stride] = from[i * from_stride];
}

// A copy of one operand's entries of an item, side by side, with masked ones as -inf.
__attribute__((noinline)) void gather(const RowJob& job, const Position& at, const Operand& operand,
                                      const Operand* mask, T* buffer, int lanes) {
  const T* from = at.in<const T>(job, operand);
  if (mask != nullptr && !job.columns && operand.length_stride == 1 && mask->length_stride == 1) {
    const unsigned char* takes_part = at.in<const unsigned char>(job, *mask);  // the usual case, in vectors
    for (int64_t i = 0; i < at.length; ++i) buffer[i] = takes_part[i] ? from[i] : minus_infinity<T>();
    return;
  }
  int64_t step = job.columns ? S::width : 1;
  if (job.columns && operand.length_stride == 1 && lanes == S::width) {
    Columns<T, S::width>::of_rows(buffer, from, operand.lane_stride, at.length);
  } else if (job.columns) {
    for (int64_t i = 0; i < at.length; ++i) {
      copy(buffer + i * step, 1, from + i * operand.length_stride, operand.lane_stride, lanes);
    }
  } else {
    copy(buffer, 1, from, operand.length_stride, at.length);
  }
  if (mask == nullptr) return;
  const unsigned char* takes_part = at.in<const unsigned char>(job, *mask);
  for (int64_t i = 0; i < at.length; ++i) {
    for (int lane = 0; lane < lanes; ++lane) {
      T& entry = buffer[i * step + lane];
      entry = takes_part[i * mask->length_stride + lane * mask->lane_stride] ? entry : minus_infinity<T>();
    }
  }
}

// An item's tile: entries in place where they lie side by side, else copies.
MULTIMAX_INLINE void lay_out(const RowJob& job, const Position& at, const Scratch& scratch, int which, Tile& t) {
  int lanes = 1;
  t.columns = job.columns;
  if (job.columns) {
    lanes = static_cast<int>(min(S::width, job.lanes - at.lane));
    t.full = lanes == S::width ? at.length : 0;
    t.partial = at.length - t.full;
    t.part = lanes;
  } else {
    t.full = at.length / S::width;
    t.part = static_cast<int>(at.length % S::width);
    t.partial = t.part != 0;
  }
  int64_t buffer = which * scratch.entries;
  auto bring = [&](const Operand& operand, const Operand* mask, T* copy_to, Stream<T>& stream) {
    if (operand.data == nullptr) return;
    if (side_by_side(job, operand) && mask == nullptr) {
      stream.data = at.in<T>(job, operand);
      stream.step = job.columns ? operand.length_stride : S::width;
    } else {
      gather(job, at, operand, mask, copy_to, lanes);
      stream.data = copy_to;
      stream.step = S::width;
    }
  };
  bring(job.x, job.mask.data ? &job.mask : nullptr, scratch.x + buffer, t.x);
  bring(job.y, nullptr, scratch.y + buffer, t.y);
  bring(job.grad, nullptr, scratch.grad + buffer, t.grad);
  t.stats = job.stats.data ? at.in<C>(job, job.stats) : nullptr;
  t.stats_stride = job.stats.lane_stride;
  t.stats_plane = job.stats_plane;
  t.home = at.in<T>(job, job.out);
  bool in_place = side_by_side(job, job.out);
  t.out.data = in_place ? t.home : scratch.out + buffer;
  t.out.step = in_place && job.columns ? job.out.length_stride : S::width;
  t.work.data = scratch.work + buffer;
  t.work.step = S::width;
  t.keeps_work = scratch.keeps_work(job);
  if (scratch.works_in_place(job)) t.work = {reinterpret_cast<C*>(t.out.data), t.out.step};
}

// Results that were not written in place.
inline void deliver(const RowJob& job, const Tile& t) {
  if (t.out.data == t.home) return;
  if (!job.columns) return copy(t.home, job.out.length_stride, t.out.data, 1, t.length());
  if (job.out.length_stride == 1 && t.full) {
    return Columns<T, S::width>::to_rows(t.home, job.out.lane_stride, t.out.data, t.length());
  }
  for (int64_t i = 0; i < t.length(); ++i) {
    copy(t.home + i * job.out.length_stride, job.out.lane_stride, t.out.data + i * S::width, 1,
         t.full ? S::width : t.part);
  }
}

}  // namespace
}  // namespace multimax::MULTIMAX_ISA
