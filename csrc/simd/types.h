// The types of a file that is compiled for one dtype of tensors, MULTIMAX_DTYPE.
#pragma once

#include "simd/memory.h"

#ifndef MULTIMAX_DTYPE
#define MULTIMAX_DTYPE f32
#endif

#define MULTIMAX_JOIN_(a, b) a##_##b
#define MULTIMAX_JOIN(a, b) MULTIMAX_JOIN_(a, b)
#define MULTIMAX_OF_DTYPE(kernels) MULTIMAX_JOIN(kernels, MULTIMAX_DTYPE)

namespace multimax::MULTIMAX_ISA {
namespace {

using T = MULTIMAX_DTYPE;
using C = Compute<T>::type;  // in which T is computed
using S = Simd<C>;
using V = S::V;
using Mask = decltype(S::first(0));

}  // namespace
}  // namespace multimax::MULTIMAX_ISA
