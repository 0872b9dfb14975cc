// Vectors of fp32 numbers for loops that are written once and compiled for AVX-512 (16 lanes) and AVX2 (8 lanes): loads
// and stores of fp32 and bf16, arithmetic, masks, exponentials, transposition of squares of registers.
//
// A loop is in a header THING_body.h without includes. Its source includes the header twice, between pragmas that only
// GCC supports; builds with clang have no such loops:
//
//   #pragma GCC push_options
//   #pragma GCC target(...)                   // the same target as in lanes_avx2.h
//   namespace thing_avx2 {
//   using namespace lanes_avx2;
//   #include "tessera/kernels/simd/thing_body.h"
//   }
//   #pragma GCC pop_options
//   ...
//   const auto loop = for_lanes(thing_avx512::loop<T>, thing_avx2::loop<T>);
//
// Both halves (lanes_avx512.h, lanes_avx2.h) define:
//   Lanes, kLanes
//   fill, add, sub, mul, div; fma: a b + c; fms: a b - c; fnma: c - a b; max: the second operand if one is NaN
//   load_lanes and store_lanes for float and BFloat16; stores round to the nearest, ties to even, and keep NaN
//   rounded_to<T>: rounds to T and back
//   Mask; first_lanes(count); lanes_between(low, high); not_numbers; any; select(mask, yes, no)
//   load_lanes(mask, from, others); store_lanes(mask, to, values): memory outside of the mask is not accessed
//   AllLanes in place of a mask; for_each_lanes(count, each): each(at, AllLanes), at the end each(at, mask)
//   sum_of, largest_of, exp_lanes, transpose
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <type_traits>

#include "tessera/kernels/simd/vector_level.h"

#if defined(__x86_64__) && !defined(__clang__)  // clang has no pragma for a target region
#define TESSERA_HAS_LANES
#endif

namespace tessera::kernels {

// The type of a mask with all lanes set. Functions with this mask do not use masked instructions, because on some
// processors a masked store takes ten times as long.
struct AllLanes {};

inline bool has_lanes() {
#ifdef TESSERA_HAS_LANES
  return vector_level() != VectorLevel::kPlain;
#else
  return false;
#endif
}

// Returns the argument that is compiled for the vector level in use, vector_level(): `avx512` or `avx2`. has_lanes()
// must be true.
template <class Loop>
Loop* for_lanes(Loop* avx512, Loop* avx2) {
  return vector_level() == VectorLevel::kAvx512 ? avx512 : avx2;
}

}  // namespace tessera::kernels
