// Going through nested state dicts: gathering what is distributed, moving it to the CPU, copying it into a dict that
// exists already.
//
//   StateDict whole = gather_state_dict(state, {.cpu_offload = true, .ranks_only = {0}});   // COLLECTIVE
//   StateDict kept = create_cpu_state_dict(state);           // once
//   copy_state_dict(state, kept);                            // each time
//
// Semantics of torch.distributed._state_dict_utils. Nothing here records gradients. What a function need not change it
// passes on: results may share memory with the input.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/state/state_value.h"

namespace tessera {

struct IterateOptions {
  bool cpu_offload = false;  // tensors of the result lie on the CPU
  // Tensors of the result are copied into those of this dict, which are then the result; it must have the same keys and
  // lengths, and tensors of the same sizes (DTensors: parts of the same sizes). Error kShape "CompanionMismatch".
  const StateDict* companion = nullptr;
  // Ranks that get a result; empty: all. Others get an empty dict, but take part in every collective.
  std::vector<int> ranks_only = {};
  // Ranks are positions in it. Without one, they are global ranks, which some DTensor or ShardedTensor must tell.
  std::shared_ptr<comm::Group> group = {};
  bool type_check = true;  // Error kShape "Unexpected value type" for undefined tensors, which are passed on otherwise
  bool non_blocking = true;  // copies to and from an accelerator are waited for once, at the end
};

// What becomes of a leaf; empty: it stays.
struct LeafFunctions {
  std::function<StateValue(const StateValue&)> sharded_tensor_func = {};
  std::function<StateValue(const StateValue&)> dtensor_func = {};
  std::function<StateValue(const StateValue&)> tensor_func = {};
};

// Leaves go through their function on every rank, in order; numbers, text, bytes and None are passed on. COLLECTIVE as
// the functions are.
StateDict iterate_state_dict(const StateDict& state_dict, const LeafFunctions& functions,
                             const IterateOptions& options = {});

// DTensors and ShardedTensors become plain tensors of the whole. COLLECTIVE over the mesh of each DTensor and the group
// of each ShardedTensor, in order, also on ranks that get no result. Error kShape for a DTensor on the meta device.
StateDict gather_state_dict(const StateDict& state_dict, const IterateOptions& options = {});

// Local parts move, nothing is gathered. No communication.
StateDict offload_state_dict_to_cpu(const StateDict& state_dict, const IterateOptions& options = {});

// Copies every tensor into that of `companion` at the same place, and returns it with the other values of `state_dict`.
// No communication.
StateDict copy_state_dict(const StateDict& state_dict, const StateDict& companion, bool non_blocking = false,
                          bool type_check = true);

struct CpuStateDictOptions {
  bool pin_memory = false;    // page-locked; without an accelerator a warning, once, and ordinary memory
  bool share_memory = false;  // the memory of tensors stays shared with processes that are forked from this one
};
// A dict like this one whose tensors lie on the CPU, with values that are not set (tensors without dims: 0). DTensors
// and ShardedTensors keep their layout. No communication.
StateDict create_cpu_state_dict(const StateDict& state_dict, const CpuStateDictOptions& options = {});

}  // namespace tessera
