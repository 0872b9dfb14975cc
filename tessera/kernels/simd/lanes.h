// fp32 numbers several at a time, for loops written once for AVX-512 (16) and AVX2 (8): loads and stores of fp32 and
// bf16, arithmetic, masks, exponentials, squares of registers transposed.
//
// A loop stands in a header THING_body.h without includes, which its source includes twice, between options that only
// GCC has; clang builds without such loops:
//
//   #pragma GCC push_options
//   #pragma GCC target(...)                   // as the half has it
//   namespace thing_avx2 {
//   using namespace lanes_avx2;
//   #include "tessera/kernels/simd/thing_body.h"
//   }
//   #pragma GCC pop_options
//   ...
//   const auto loop = for_lanes(thing_avx512::loop<T>, thing_avx2::loop<T>);
//
// Both halves (lanes_avx512.h, lanes_avx2.h) have:
//   Lanes, kLanes; fill, add, sub, mul, div; fma: a b + c, fms: a b - c, fnma: c - a b; max: of a NaN in one operand
//   the second; load_lanes, store_lanes of float and BFloat16, rounded to the nearest, ties to even, NaN stays NaN;
//   rounded_to<T>: as a T has it
//   Mask; first_lanes(count); lanes_between(low, high); not_numbers; any; select(mask, yes, no);
//   load_lanes(mask, from, others); store_lanes(mask, to, values): other memory is not touched
//   AllLanes in place of a mask; for_each_lanes(count, each): each(at, AllLanes or the mask of the last lanes)
//   sum_of, largest_of, exp_lanes, transpose
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <type_traits>

#include "tessera/kernels/simd/vector_level.h"

#if defined(__x86_64__) && !defined(__clang__)  // clang has no target by region
#define TESSERA_HAS_LANES
#endif

namespace tessera::kernels {

// In place of a mask where no lane is left out, as some processors take ten times as long to store with a mask.
struct AllLanes {};

inline bool has_lanes() {
#ifdef TESSERA_HAS_LANES
  return vector_level() != VectorLevel::kPlain;
#else
  return false;
#endif
}

// The one of two loops that runs here. Only where has_lanes().
template <class Loop>
Loop* for_lanes(Loop* avx512, Loop* avx2) {
  return vector_level() == VectorLevel::kAvx512 ? avx512 : avx2;
}

}  // namespace tessera::kernels
