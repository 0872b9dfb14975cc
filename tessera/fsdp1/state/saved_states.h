// The optimizer state of all ranks. Before tensors are sent, the ranks all-gather the names, shapes, dtypes and scalars
// of their states. All ranks have the same metadata afterwards, so they call the same collectives and throw the same
// errors. Internal to fsdp1/state.
#pragma once

#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/fsdp1/state/units.h"
#include "tessera/state/state_value.h"

namespace tessera {

// Returns the dict "state" of an optimizer's dict. Error kShape, which begins with `where`, when there is no such dict.
const StateDict& states_of(const StateDict& optim_state_dict, const char* where);

// This rank's entries of an optimizer's dict, each with the parameter that it belongs to.
struct LocalOptimStates {
  std::vector<std::pair<const Fsdp1Units::Parameter*, const StateDict*>> entries;  // in the order of the ids
  std::unordered_map<const Fsdp1Units::Parameter*, const StateDict*> by_parameter;
  std::vector<StateKey> user_keys;

  // Returns null when this rank has no state of the parameter.
  const StateDict* state_of(const Fsdp1Units::Parameter* parameter) const {
    const auto found = by_parameter.find(parameter);
    return found == by_parameter.end() ? nullptr : found->second;
  }
};
// Finds the parameter of each entry of the dict "state" in `saved`, which is this rank's optimizer dict. The id of a
// parameter is the position of its name in `optimizer_parameters`. Errors kShape: ids that no parameter has; states of
// parameters that are not dicts; state tensors with another number of elements than this rank has of the parameter.
LocalOptimStates find_local_optim_states(const Fsdp1Units& model, const std::vector<std::string>& optimizer_parameters,
                                         const StateDict& saved);

// The properties of the state of one parameter that are equal on all ranks with elements of the parameter.
struct MergedOptimState {
  std::map<std::string, c10::ScalarType> tensors;  // dtype of each tensor with dims
  StateDict others;                                // tensors without dims, then other values, each sorted by name
};
struct MergedOptimStates {
  // The parameters with state, in the order in which a state dict lists them. With use_orig_params: those with state on
  // any rank, sorted by name. Without it: those of rank 0 in rank 0's order, then parameters in no FSDP unit that have
  // state on this rank but not on rank 0.
  std::vector<const Fsdp1Units::Parameter*> parameters;
  std::map<const Fsdp1Units::Parameter*, MergedOptimState> states;  // for parameters in FSDP units
};
// Combines the names, dtypes and scalars of the optimizer states of all ranks; elements of tensors with dims are not
// exchanged. COLLECTIVE over the group. Error kShape when the states of the ranks do not fit together. All ranks throw
// the same error; only a rank whose model lacks a parameter of another rank may throw alone.
MergedOptimStates merge_states_of_ranks(const Fsdp1Units& model, const LocalOptimStates& local, comm::Group& group);

// Returns this rank's elements of one optimizer state tensor (such as exp_avg) of an original parameter, 1-d in storage
// order; empty when this rank has no elements. `parameter` is the parameter in named_parameters(); it may be a flat
// parameter, and `index` is the position of the original parameter among those of which it consists. `state` is this
// rank's optimizer state of `parameter`, or null, and `name` is the key of the tensor in `state`. `dtype` is the dtype
// of an empty result. The result is a view of the tensor in `state` where possible.
at::Tensor local_state_range(const Fsdp1Units& model, const Fsdp1Units::Parameter& parameter, size_t index,
                             const StateDict* state, const std::string& name, c10::ScalarType dtype);

}  // namespace tessera
