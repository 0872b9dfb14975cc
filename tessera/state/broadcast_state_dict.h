// Loads whole tensors into a dict of DTensors: from rank 0, or from a copy that each rank has. All dicts are flat
// (flatten_state_dict).
//
//   broadcast_state_dict(full, local, {.group = world->group()});     // COLLECTIVE; reads `full` on rank 0 only
//   distribute_state_dict(full, local, c10::kCPU);                    // every rank passes `full`
//
// Semantics of torch.distributed._state_dict_utils. The local shards are correct for every placement; PyTorch's are
// wrong for uneven strided shards.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "tessera/comm/group/group.h"
#include "tessera/state/state_value.h"

namespace tessera {

struct BroadcastStateOptions {
  std::shared_ptr<comm::Group> group = {};  // rank 0 of this group passes the values
  c10::Device device = c10::kCPU;           // device of the broadcast tensors; plain tensors stay on it
  bool strict = false;                      // removes from `local` the keys that rank 0's dict does not have
  bool cpu_offload = false;                 // moves the results to the CPU
};

// Sends rank 0's tensors one at a time, so that at most one whole tensor is in memory in addition to `local`. The ranks
// receive and drop tensors whose key `local` does not have. A DTensor of `local` takes its local shard: it is written
// in place, or replaced by a new DTensor when it is on the meta device. A plain tensor of `local` is written in place
// when its size, dtype and device match, and is replaced otherwise. Any other value is replaced. COLLECTIVE over the
// group. Error kShape, on all ranks, for a value whose shape is not the DTensor's, for tensors inside lists or dicts,
// and for DTensors in rank 0's dict.
void broadcast_state_dict(const StateDict& full, StateDict& local, const BroadcastStateOptions& options);

// Stores the values of `full` in `local` by the rules of broadcast_state_dict(), but without communication: every rank
// passes the whole tensors in `full`. Keys that `local` does not have are skipped. Error kShape for a tensor in `full`
// that does not have the shape of the DTensor in `local`, and for a dict or ShardedTensor in `full`.
void distribute_state_dict(const StateDict& full, StateDict& local, c10::Device device);

}  // namespace tessera
