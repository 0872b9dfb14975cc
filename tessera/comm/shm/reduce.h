// The arithmetic of reductions: out[i] = s0[i] op s1[i] op ..., always evaluated in the order of the sources.
//
//   check_reducible(at::kFloat, c10d::ReduceOp::AVG);
//   reduce(out, {a, b, c}, 1000, at::kFloat, c10d::ReduceOp::AVG);
//
// float16 and bfloat16 are accumulated in float32 and rounded once. min and max return NaN if one of the values is NaN,
// as at::minimum does. Integers wrap around. For bool, sum and max mean "or", product and min mean "and". Thread-safe.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

namespace tessera::comm::shm {

using RedOp = c10d::ReduceOp::RedOpType;

// Throws Error kShape for unsupported reductions: avg of integers, bitwise operations on floating point, complex types.
void check_reducible(c10::ScalarType type, RedOp op);

// Reduces `count` elements. `out` may be one of the sources, but must not overlap a source otherwise.
void reduce(void* out, const std::vector<const void*>& sources, size_t count, c10::ScalarType type, RedOp op);

const char* name_of(RedOp op) noexcept;  // "sum", "avg", ...

}  // namespace tessera::comm::shm
