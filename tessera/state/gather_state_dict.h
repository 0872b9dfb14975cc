// Walks nested state dicts: gathers DTensors and ShardedTensors, moves tensors to the CPU, and copies tensors into an
// existing dict.
//
//   StateDict whole = gather_state_dict(state, {.cpu_offload = true, .ranks_only = {0}});   // COLLECTIVE
//   StateDict kept = create_cpu_state_dict(state);           // once
//   copy_state_dict(state, kept);                            // each time
//
// Semantics of torch.distributed._state_dict_utils. The functions record no autograd graph. Tensors that a function
// does not need to change are returned as they are, so a result may share memory with the input.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/state/state_value.h"

namespace tessera {

struct IterateOptions {
  bool cpu_offload = false;  // moves the tensors of the result to the CPU
  // If set, the tensors of the result are copied into the tensors of this dict, and the result then holds the tensors
  // of this dict. This dict must have the keys and the list lengths of the input, and tensors of the result's sizes
  // (for DTensors: local tensors of the same sizes); else Error kShape "CompanionMismatch".
  const StateDict* companion = nullptr;
  // Ranks that get a result; empty for all ranks. The other ranks call every collective too, and get an empty dict.
  std::vector<int> ranks_only = {};
  // The group whose group ranks `ranks_only` lists. Without a group, `ranks_only` lists global ranks; this process then
  // takes its own rank from a DTensor or ShardedTensor of the dict.
  std::shared_ptr<comm::Group> group = {};
  bool type_check = true;  // Error kShape "Unexpected value type" for undefined tensors, which are passed on otherwise
  bool non_blocking = true;  // copies to and from an accelerator are waited for once, at the end
};

// The functions that replace a leaf; an empty function leaves the leaf unchanged.
struct LeafFunctions {
  std::function<StateValue(const StateValue&)> sharded_tensor_func = {};
  std::function<StateValue(const StateValue&)> dtensor_func = {};
  std::function<StateValue(const StateValue&)> tensor_func = {};
};

// Replaces each DTensor, ShardedTensor or plain tensor by the result of the function for its type. Every rank calls the
// functions for all of them in order. Numbers, text, bytes and None are returned unchanged. COLLECTIVE if a function is
// COLLECTIVE.
StateDict iterate_state_dict(const StateDict& state_dict, const LeafFunctions& functions,
                             const IterateOptions& options = {});

// Replaces DTensors and ShardedTensors by plain tensors with the whole values. COLLECTIVE over the mesh of each DTensor
// and the group of each ShardedTensor, one after another in the order of the dict; ranks that get no result must call
// it, too. Error kShape for a DTensor on the meta device.
StateDict gather_state_dict(const StateDict& state_dict, const IterateOptions& options = {});

// Moves the local tensors to the CPU. Nothing is gathered. No communication.
StateDict offload_state_dict_to_cpu(const StateDict& state_dict, const IterateOptions& options = {});

// Copies every tensor of `state_dict` into the tensor that `companion` has at the same path. Returns the tensors of
// `companion` with the other values of `state_dict`. No communication.
StateDict copy_state_dict(const StateDict& state_dict, const StateDict& companion, bool non_blocking = false,
                          bool type_check = true);

struct CpuStateDictOptions {
  bool pin_memory = false;    // page-locked memory; without an accelerator one warning, and ordinary memory
  bool share_memory = false;  // the memory of the tensors is shared with processes that are forked from this one
};
// Returns a dict of the same structure with uninitialised tensors on the CPU; tensors without dims are 0. DTensors keep
// their mesh and placements, ShardedTensors their shards. No communication.
StateDict create_cpu_state_dict(const StateDict& state_dict, const CpuStateDictOptions& options = {});

}  // namespace tessera
