// Reductions that this rank makes itself, where the back-end does not make them as Tessera promises. Internal to comm.
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
// "float32, float64, ...": what can_reduce() by `op`.
const char* reducible_types(ReduceOp op);
// Complex numbers add up part by part.
bool sums_by_parts(const at::Tensor& tensor, ReduceOp op);
c10d::ReduceOp::RedOpType carried_op(ReduceOp op);
// output = parts[0] op parts[1] op ..., in this order, in pieces that stay in the cache. Half precision is summed in
// float32 and rounded once.
void reduce_parts(const at::Tensor& output, const at::Tensor& parts, ReduceOp op);

}  // namespace tessera::comm
