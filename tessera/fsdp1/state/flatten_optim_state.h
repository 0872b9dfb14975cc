// Converts optimizer state by names of original parameters (the result of optim_state_dict) to the state that this
// rank's FSDP1 optimizer keeps: the state of its flat parameters, or of its ranges of the original parameters.
//
//   FlattenedOptimState flat = flatten_optim_state_dict(Fsdp1Units::of(*model), saved, {});
//   StateDict by_id = rekey_flattened(flat, model, parameter_group_names(*optimizer), false);
//
// Tensors are sharded one at a time: in addition to the results, a rank holds at most one saved tensor and its shard.
// Every rank throws the same Error when shapes, dtypes, names of states or steps do not match, or when a member
// (original parameter) lacks a state that other members of its unit have. (PyTorch checks only flat parameters; with
// use_orig_params it loads wrong ranges without an error.)
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/fsdp1/state/units.h"
#include "tessera/optim/optimizer.h"
#include "tessera/state/state_value.h"

namespace tessera {

// The state of one parameter of the optimizer.
struct FlattenedOptimEntry {
  std::string parameter;  // as in Module::named_parameters
  StateDict state;
};
struct FlattenedOptimState {
  std::vector<FlattenedOptimEntry> entries;
  StateDict user_state;                   // entries whose key is not a parameter
  std::optional<StateList> param_groups;  // by original names; nullopt when the input has no groups
};

struct FlattenOptions {
  bool rank0_only = false;  // only the dict of the group's rank 0 is read
  // Set when the state is loaded into an optimizer whose dict has names as keys. Such a dict needs a state also for
  // parameters without elements on this rank; their state is copied from `named_optimizer`.
  const optim::Optimizer* named_optimizer = nullptr;
  // With use_orig_params: a trained parameter may lack state although others of its unit have state.
  bool partial_units = false;
  std::shared_ptr<comm::Group> group = {};  // default: the FSDP group
};

// Converts the state dict of original parameters to the state of this rank's FSDP1 optimizer (see the top of this
// file). COLLECTIVE over the group. Errors kShape with PyTorch's error messages.
FlattenedOptimState flatten_optim_state_dict(const Fsdp1Units& model, const StateDict& optim_state_dict,
                                             const FlattenOptions& options);

// The optimizer states of the members (original parameters) of one unit, by index of the member. A member without a
// state has no entry.
using UnitStates = std::map<size_t, StateDict>;
// Checks the states of one unit: throws the errors that flatten_optim_state and shard_orig_param_state would throw for
// them. `partial`: FlattenOptions::partial_units. No communication.
void check_unit_states(const Fsdp1Unit& unit, const UnitStates& states, bool partial = false);

// Returns the state of one flat parameter, on the CPU, from the states of its original parameters (`states`). For each
// state name whose values are tensors with dims, the result is this rank's shard ([sharded_numel]; without sharding all
// elements), with zeros for an original parameter that lacks this state. The values of any other state must be equal in
// all original parameters. Returns {} when `states` is empty. COLLECTIVE over the unit's group for sharded values.
StateDict flatten_optim_state(const Fsdp1Unit& unit, const UnitStates& states);
// Returns the state of one original parameter: a tensor with dims becomes this rank's 1-d range of its elements
// (without sharding it keeps its shape), other values stay unchanged. Returns {} when this rank has no elements of the
// parameter. COLLECTIVE over the unit's group for sharded values, also on ranks with an empty result.
StateDict shard_orig_param_state(const Fsdp1Unit& unit, size_t member, const StateDict& state);

// The names of the parameters of each group of an optimizer, in the order of their ids.
using ParameterGroupNames = std::vector<std::vector<std::string>>;
ParameterGroupNames parameter_group_names(const optim::Optimizer& optimizer);

// Returns the optimizer dict, by id or by name, for an optimizer with the parameter groups `optimizer_groups`. Each
// group has the hyper-parameters of the saved groups that its parameters were in, or none when its parameters were in
// no saved group. States of parameters that the optimizer does not have are left out with a warning. Errors kShape: a
// parameter group names an unknown parameter; parameters of one group were saved in groups with different
// hyper-parameters; a group without parameters matches several saved ones.
StateDict rekey_flattened(const FlattenedOptimState& flat, const Fsdp1Units& model,
                          const ParameterGroupNames& optimizer_groups, bool by_name);

}  // namespace tessera
