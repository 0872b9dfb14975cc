// The arithmetic of reductions: out[i] = s0[i] op s1[i] op ..., always in the order of the sources.
//
//   check_reducible(at::kFloat, c10d::ReduceOp::AVG);
//   reduce(out, {a, b, c}, 1000, at::kFloat, c10d::ReduceOp::AVG);
//
// float16 and bfloat16 are accumulated in float32 and rounded once. NaN wins in min and max, as in at::minimum.
// Integers wrap around. Of bool, sum and max are "or", product and min "and". Thread-safe.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

namespace tessera::comm::shm {

using RedOp = c10d::ReduceOp::RedOpType;

// Error kShape for what is not supported: avg of integers, bitwise operations on floating point, complex numbers.
void check_reducible(c10::ScalarType type, RedOp op);

// `out` may be one of the sources, but not overlap otherwise.
void reduce(void* out, const std::vector<const void*>& sources, size_t count, c10::ScalarType type, RedOp op);

const char* name_of(RedOp op) noexcept;  // "sum", "avg", ...

}  // namespace tessera::comm::shm
