// How the shards of a parameter group become its unsharded parameters. The plan is chosen once, when the group is made.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/parallel/data_parallel/flat_layout.h"
#include "tessera/parallel/data_parallel/mixed_precision.h"
#include "tessera/parallel/fsdp/sharded_param.h"
#include "tessera/parallel/fsdp/unsharded_storage.h"

namespace tessera {

enum class UnshardMethod {
  // One rank, no cast and no offloading: forward reads the shards themselves.
  kAlias,
  // One parameter, or one rank with a cast or offloaded shards: the gathered buffer has the layout of the unsharded
  // parameters already.
  kInPlace,
  // One parameter (an embedding) is at least three quarters of the group: the all-gather writes to the storage of the
  // unsharded parameters, and the chunks of that parameter are moved together there, with the others after them. Saves
  // a buffer of the group's size. CPU only.
  kCompact,
  // The all-gather writes to a buffer of its own, from which each parameter is copied.
  kUnpack,
};

struct GatherPlan {
  UnshardMethod method;
  FlatLayout layout;                       // of the gathered buffer
  std::vector<int64_t> unsharded_offsets;  // bytes, of each parameter in the storage of unsharded parameters
  int64_t unsharded_bytes = 0;             // size of that storage

  bool gathers_into_whole() const { return method == UnshardMethod::kInPlace || method == UnshardMethod::kCompact; }
};

// Chooses the plan. Sets the gather_dtype of `params`, and for kCompact moves the largest parameter to the front.
// shards_on_host: the shards are in host memory, though the mesh is of accelerators.
GatherPlan plan_gather(std::vector<ShardedParam>& params, const DeviceMesh& mesh, const MixedPrecisionPolicy& policy,
                       bool shards_on_host = false);

// Copies the gathered buffer to the unsharded parameters in `whole`, for the plans that need a copy. With kCompact
// `gathered` must be a view of `whole`.
void copy_to_unsharded(const GatherPlan& plan, const at::TensorBase& gathered, const UnshardedStorage& whole,
                       BufferPool& pool);

}  // namespace tessera
