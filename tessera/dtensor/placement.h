// How a tensor lies on one dim of a mesh. Semantics of torch.distributed.tensor.placement_types.
//
//   Placements p = {Shard(0), Replicate()};
//
// Values, compared by content.
#pragma once

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <string>

#include "tessera/comm/collectives.h"

namespace tessera {

using comm::ReduceOp;

struct Placement {
  enum class Kind : uint8_t { kReplicate, kShard, kStridedShard, kPartial };
  Kind kind = Kind::kReplicate;
  ReduceOp reduce_op = ReduceOp::kSum;  // kPartial only
  int32_t dim = 0;                      // kShard, kStridedShard
  int32_t split_factor = 1;             // kStridedShard only

  bool is_replicate() const { return kind == Kind::kReplicate; }
  bool is_shard() const { return kind == Kind::kShard; }
  bool is_shard(int64_t d) const { return kind == Kind::kShard && dim == d; }
  bool is_partial() const { return kind == Kind::kPartial; }
  bool operator==(const Placement&) const = default;
};

inline Placement Replicate() { return {}; }
inline Placement Shard(int64_t dim) { return {Placement::Kind::kShard, ReduceOp::kSum, static_cast<int32_t>(dim), 1}; }
inline Placement StridedShard(int64_t dim, int64_t split_factor) {
  return {Placement::Kind::kStridedShard, ReduceOp::kSum, static_cast<int32_t>(dim), static_cast<int32_t>(split_factor)};
}
inline Placement Partial(ReduceOp op = ReduceOp::kSum) { return {Placement::Kind::kPartial, op, 0, 1}; }

using Placements = c10::SmallVector<Placement, 4>;  // one per mesh dim

// "R", "S(0)", "_S(0, 4)", "P(sum)"; a list as "(S(0), R)".
std::string to_string(const Placement& placement);
std::string to_string(const Placements& placements);

}  // namespace tessera
