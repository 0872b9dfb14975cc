// The plan by which an all-gather of a group's shards becomes its unsharded parameters. The plan is chosen once, when
// the parameter group is made.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/parallel/data_parallel/flat_layout.h"
#include "tessera/parallel/data_parallel/mixed_precision.h"
#include "tessera/parallel/fsdp/sharded_param.h"
#include "tessera/parallel/fsdp/unsharded_storage.h"

namespace tessera {

enum class UnshardMethod {
  // There is one rank, no cast and no offloading, so forward reads the shards themselves.
  kAlias,
  // Chosen with several ranks if the group has only one parameter, and with one rank if a parameter is cast or
  // offloaded. The gathered buffer then has the layout of the unsharded parameters and serves as their storage.
  kInPlace,
  // One parameter (an embedding) is at least three quarters of the group: the all-gather writes to the storage of the
  // unsharded parameters, where the chunks of the largest parameter are moved together and the other parameters are
  // placed after them. This saves a buffer of the group's size. CPU only.
  kCompact,
  // The all-gather writes to a separate buffer, from which each parameter is copied to the storage of the unsharded
  // parameters.
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
// shards_on_host: the shards are in host memory, although the mesh's device is an accelerator.
GatherPlan plan_gather(std::vector<ShardedParam>& params, const DeviceMesh& mesh, const MixedPrecisionPolicy& policy,
                       bool shards_on_host = false);

// Copies the gathered buffer to the storage `whole` of the unsharded parameters, if the plan's method is kUnpack or
// kCompact; otherwise does nothing. For kCompact, `gathered` must be a view of `whole`.
void copy_to_unsharded(const GatherPlan& plan, const at::TensorBase& gathered, const UnshardedStorage& whole,
                       BufferPool& pool);

}  // namespace tessera
