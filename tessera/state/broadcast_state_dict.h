// Whole values into a dict of DTensors: from one rank, or each rank its own copy. Flat dicts (flatten_state_dict).
//
//   broadcast_state_dict(full, local, {.group = world->group()});     // COLLECTIVE; `full` counts on rank 0 only
//   distribute_state_dict(full, local, c10::kCPU);                    // every rank has `full`
//
// Semantics of torch.distributed._state_dict_utils; parts of any placement are right (PyTorch's are not for uneven
// strided shards).
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "tessera/comm/group/group.h"
#include "tessera/state/state_value.h"

namespace tessera {

struct BroadcastStateOptions {
  std::shared_ptr<comm::Group> group = {};  // its rank 0 has the values
  c10::Device device = c10::kCPU;           // on which tensors travel, and plain ones stay
  bool strict = false;                      // keys that rank 0 has not are taken out of `local`
  bool cpu_offload = false;                 // results lie on the CPU
};

// One tensor at a time: at most one whole one is in memory beside what was there. Keys that `local` lacks are received
// and dropped. A DTensor gets its part: in place, or as a new one when it is on the meta device; a plain tensor of
// `local` is written in place where it has the size, dtype and device; anything else is replaced. COLLECTIVE over the
// group. Errors, alike on all ranks: kShape for another shape than a DTensor's, tensors inside of lists or dicts,
// DTensors among rank 0's values.
void broadcast_state_dict(const StateDict& full, StateDict& local, const BroadcastStateOptions& options);

// The same without communication, from this rank's own copies: keys that `local` lacks are skipped. Error kShape for
// another shape than a DTensor's.
void distribute_state_dict(const StateDict& full, StateDict& local, c10::Device device);

}  // namespace tessera
