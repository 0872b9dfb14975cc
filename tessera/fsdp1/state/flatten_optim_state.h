// Optimizer state by names of original parameters, as optim_state_dict gives it, turned into what this rank's optimizer
// keeps: the state of its flat parameters, or of its ranges of the original ones.
//
//   FlattenedOptimState flat = flatten_optim_state_dict(Fsdp1Units::of(*model), saved, {});
//   StateDict by_id = rekey_flattened(flat, model, parameter_group_names(*optimizer), false);
//
// Tensors are cut one at a time: beside its results no rank holds more than one parameter's state and what it is cut
// from. Where a value does not fit every rank throws the same Error: shapes, dtypes, names of states, members that lack
// what others have, steps. (PyTorch checks only flat parameters; with use_orig_params it cuts wrong sizes silently.)
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/fsdp1/state/units.h"
#include "tessera/optim/optimizer.h"
#include "tessera/state/state_value.h"

namespace tessera {

// State of one parameter of the optimizer.
struct FlattenedOptimEntry {
  std::string parameter;  // its name in Module::named_parameters
  StateDict state;
};
struct FlattenedOptimState {
  std::vector<FlattenedOptimEntry> entries;
  StateDict user_state;                   // keys that name no parameter
  std::optional<StateList> param_groups;  // with original names; none when the input had none
};

struct FlattenOptions {
  bool rank0_only = false;  // the dict of the group's rank 0 counts, others' are not looked at
  // Keyed or named optimizers want state for parameters of which a rank has nothing, too: their own is copied.
  const optim::Optimizer* named_optimizer = nullptr;
  // With use_orig_params: trained parameters may lack state beside others of their unit that have some.
  bool partial_units = false;
  std::shared_ptr<comm::Group> group = {};  // the FSDP group by default
};

// COLLECTIVE over the group. Errors kShape with upstream's texts.
FlattenedOptimState flatten_optim_state_dict(const Fsdp1Units& model, const StateDict& optim_state_dict,
                                             const FlattenOptions& options);

// The states of the members of one unit that have any, by member.
using UnitStates = std::map<size_t, StateDict>;
// Checks what flatten_optim_state and shard_orig_param_state assume. partial: see FlattenOptions. No communication.
void check_unit_states(const Fsdp1Unit& unit, const UnitStates& states, bool partial = false);

// One flat parameter's state: tensors with dims become this rank's shard ([sharded_numel], the whole without sharding),
// members without the state count as zeros; others must be the same in all members. Results on the CPU. Empty when
// `states` is. COLLECTIVE over the unit's group for sharded values.
StateDict flatten_optim_state(const Fsdp1Unit& unit, const UnitStates& states);
// One original parameter's state: this rank's range of tensors with dims, 1-d, other values as they are. Empty where
// the rank has nothing of the parameter. COLLECTIVE over the unit's group for sharded values, also then.
StateDict shard_orig_param_state(const Fsdp1Unit& unit, size_t member, const StateDict& state);

// Names of the parameters of each group of an optimizer, in the order of their ids.
using ParameterGroupNames = std::vector<std::vector<std::string>>;
ParameterGroupNames parameter_group_names(const optim::Optimizer& optimizer);

// Keyed as the optimizer with these groups keeps it: by id, or by name. Its groups are the result's, in its order, with
// the settings that their parameters were saved with; none where they were in no saved group. What the optimizer does
// not train is left out with a warning. Errors kShape: a parameter group names an unknown parameter; parameters of one
// group that were saved in groups with different hyper-parameters; several saved groups without parameters for one.
StateDict rekey_flattened(const FlattenedOptimState& flat, const Fsdp1Units& model,
                          const ParameterGroupNames& optimizer_groups, bool by_name);

}  // namespace tessera
