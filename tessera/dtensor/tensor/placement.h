// How a tensor is distributed over one dim of a mesh. The semantics are those of
// torch.distributed.tensor.placement_types.
//
//   Placements p = {Shard(0), Replicate()};
//
// Placements are values and are compared by content.
#pragma once

#include <c10/util/SmallVector.h>

#include <bit>
#include <cstdint>
#include <string>

#include "tessera/comm/group/reduce_op.h"

namespace tessera {

using comm::ReduceOp;

struct Placement {
  // kNormPartial: each rank holds the vector norm, of order p, of its local elements. The global norm is (sum of
  // x^p)^(1/p) over the ranks' values x. Only norm operations make this placement.
  enum class Kind : uint8_t { kReplicate, kShard, kStridedShard, kPartial, kNormPartial };
  Kind kind = Kind::kReplicate;
  ReduceOp reduce_op = ReduceOp::kSum;  // kPartial only
  int32_t dim = 0;                      // kShard, kStridedShard
  int32_t split_factor = 1;             // kStridedShard: number of pieces; kNormPartial: bits of the order p as a float

  bool is_replicate() const { return kind == Kind::kReplicate; }
  bool is_shard() const { return kind == Kind::kShard; }
  bool is_shard(int64_t d) const { return kind == Kind::kShard && dim == d; }
  bool is_strided_shard() const { return kind == Kind::kStridedShard; }
  // Whether the tensor is sharded along a dim: each rank holds one piece of it (Shard) or several pieces
  // (StridedShard).
  bool is_any_shard() const { return kind == Kind::kShard || kind == Kind::kStridedShard; }
  // Whether the local tensors of the ranks must be reduced to get the values of the tensor.
  bool is_partial() const { return kind == Kind::kPartial || kind == Kind::kNormPartial; }
  bool is_partial(ReduceOp op) const { return kind == Kind::kPartial && reduce_op == op; }
  float norm_order() const { return std::bit_cast<float>(split_factor); }
  bool operator==(const Placement&) const = default;
};

inline Placement Replicate() { return {}; }
inline Placement Shard(int64_t dim) { return {Placement::Kind::kShard, ReduceOp::kSum, static_cast<int32_t>(dim), 1}; }
inline Placement StridedShard(int64_t dim, int64_t split_factor) {
  return {Placement::Kind::kStridedShard, ReduceOp::kSum, static_cast<int32_t>(dim),
          static_cast<int32_t>(split_factor)};
}
inline Placement NormPartial(float order) {
  return {Placement::Kind::kNormPartial, ReduceOp::kSum, 0, std::bit_cast<int32_t>(order)};
}
inline Placement Partial(ReduceOp op = ReduceOp::kSum) { return {Placement::Kind::kPartial, op, 0, 1}; }

using Placements = c10::SmallVector<Placement, 4>;  // one per mesh dim

// Returns "R", "S(0)", "_S(0, 4)" or "P(sum)"; for a list "(S(0), R)".
std::string to_string(const Placement& placement);
std::string to_string(const Placements& placements);

}  // namespace tessera
