// Broadcasts a state dict that only rank 0 has to all ranks of a group. First the nested dict is sent; each tensor with
// at least one dim is replaced in it by a meta tensor of the same shape and dtype (an announced tensor). Then the
// values of these tensors are sent one at a time, so that no rank holds more than one tensor in flight.
//
//   StateDict tree = broadcast_processed_state(group, rank == 0 ? saved : StateDict{});
//   for (auto& [name, value] : tree.at("state").dict().at("a.weight").dict()) value = broadcast_state(group, value);
//
// PyTorch's FSDP loads a state dict in this way with rank0_only.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "tessera/comm/collectives/agreement.h"
#include "tessera/comm/group/group.h"
#include "tessera/state/state_value.h"

namespace tessera {

// Returns the state dict of the root: `state` itself on the root, and the same dict with meta tensors on the other
// ranks. `state` is ignored on the other ranks. COLLECTIVE over the group. Error kShape on every rank when the root's
// dict contains DTensors or ShardedTensors, which cannot be sent.
StateDict broadcast_processed_state(comm::Group& group, const StateDict& state, int root = 0);
// Replaces each announced tensor in `value`, also inside lists and dicts, by a tensor with the root's values. The
// announced tensors are those with at least one dim; ranks other than the root have meta tensors in their place.
// `value` is a value of the dict that broadcast_processed_state returned. On every rank the new tensors are on
// `device`. `subject` names the value in messages. COLLECTIVE over the group, with one broadcast for each announced
// tensor that has elements. Error kShape, on a rank other than the root, for a tensor with dims that is not a meta
// tensor.
StateValue broadcast_state(comm::Group& group, const StateValue& value, c10::Device device, std::string_view subject,
                           int root = 0);

// Returns the root's tensor on every rank, on `device`. The other ranks pass a tensor with the dtype and the shape of
// the root's tensor; its values are ignored. COLLECTIVE over the group.
at::Tensor broadcast_tensor(comm::Group& group, const at::Tensor& tensor, c10::Device device, std::string_view subject,
                            int root = 0);

// Throws Error kConfig on every rank unless all ranks pass equal `facts` (names with values); the message lists the
// differences. The ranks first exchange digests of the facts, so that equal facts cost one small message. COLLECTIVE
// over the group.
void check_equal_on_ranks(comm::Group& group, const comm::NamedValues& facts, std::string_view remedy);

// Returns a copy of `value` in which every tensor has its own memory.
StateValue clone_state(const StateValue& value);

}  // namespace tessera
