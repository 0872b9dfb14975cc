// Reductions that a rank computes itself, where the back-end's reductions lack Tessera's semantics (capabilities.h).
// Internal to comm.
//
//   reduce_parts(output, received.view({ranks, length}), ReduceOp::kSum);     // in rank order
//
// Thread-safe for different tensors.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/ScalarType.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "tessera/comm/group/reduce_op.h"

namespace at {
class Tensor;
}

namespace tessera::comm {

bool is_half(c10::ScalarType type);
bool can_reduce(c10::ScalarType type, ReduceOp op);
// The types for which can_reduce() is true, for messages: "float32, float64, ...".
const char* reducible_types(ReduceOp op);
// Whether a complex tensor may be reduced as a real one with separate real and imaginary parts (sums and averages).
bool reduces_as_real(const at::Tensor& tensor, ReduceOp op);
// The c10d operation for `op`.
c10d::ReduceOp::RedOpType to_c10d_op(ReduceOp op);
// Computes output = parts[0] op parts[1] op ..., in this order. `parts` is [ranks, n], `output` [n]. Half precision is
// accumulated in float32 and rounded once.
void reduce_parts(const at::Tensor& output, const at::Tensor& parts, ReduceOp op);

}  // namespace tessera::comm
