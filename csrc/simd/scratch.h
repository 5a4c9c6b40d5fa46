// Memory of one thread, taken piece by piece.
#pragma once

#include <cstdint>

#include "simd/simd.h"

namespace multimax::MULTIMAX_ISA {

struct Pieces {
  char* base;       // null where only the size is asked for
  int64_t gap = 0;  // between pieces
  int64_t bytes = 0;

  explicit Pieces(void* memory, int64_t gap = 0) : base(static_cast<char*>(memory)), gap(gap) {}

  template <class T>
  T* take(int64_t n) {
    T* p = reinterpret_cast<T*>(base + bytes);
    bytes += (n * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64 + gap;
    return p;
  }
};

}  // namespace multimax::MULTIMAX_ISA
