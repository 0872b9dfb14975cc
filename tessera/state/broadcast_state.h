// State that only rank 0 has, given to all ranks of a group: first its tree, in which tensors with dims are only
// announced, then one tensor at a time, so that no rank ever holds more than it is working on.
//
//   StateDict tree = broadcast_processed_state(group, rank == 0 ? saved : StateDict{});
//   for (auto& [name, value] : tree.at("state").dict().at("a.weight").dict()) value = broadcast_state(group, value);
//
// What torch.distributed.fsdp does for rank0_only. Announced tensors are meta tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "tessera/comm/collectives/agreement.h"
#include "tessera/comm/group/group.h"
#include "tessera/state/state_value.h"

namespace tessera {

// The root's tree: itself on the root, with meta tensors on the others. What others pass is not looked at. COLLECTIVE
// over the group; when the root's tree cannot travel (DTensors, ShardedTensors) every rank throws Error kShape.
StateDict broadcast_processed_state(comm::Group& group, const StateDict& state, int root = 0);
// The value of which broadcast_processed_state made `value`: on the root itself, but tensors on `device`; elsewhere
// announced tensors, also those inside lists and dicts, become those of the root. COLLECTIVE over the group, once for
// each tensor with dims. Error kShape for one that is neither announced nor without dims on another rank than the root.
StateValue broadcast_state(comm::Group& group, const StateValue& value, c10::Device device, std::string_view subject,
                           int root = 0);

// The tensor of the root on every rank, on `device`; of `tensor` the others look at dtype and shape alone. COLLECTIVE
// over the group.
at::Tensor broadcast_tensor(comm::Group& group, const at::Tensor& tensor, c10::Device device, std::string_view subject,
                            int root = 0);

// Throws on every rank, with what differs, when facts do; sends digests where they are alike. COLLECTIVE over the
// group.
void check_alike(comm::Group& group, const comm::Facts& facts, std::string_view remedy);

// The same values, tensors copied.
StateValue clone_state(const StateValue& value);

}  // namespace tessera
