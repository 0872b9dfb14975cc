// Optimizer state by names of original parameters, as optim_state_dict gives it, turned into what this rank's optimizer
// keeps: the state of its flat parameters, or of its ranges of the original ones.
//
//   FlattenedOptimState flat = flatten_optim_state_dict(Fsdp1Units::of(*model), saved, {});
//   StateDict by_id = rekey_flattened(flat, model, optimizer_parameter_names(*optimizer), false);
//
// Tensors are cut one at a time: beside its results no rank holds more than one parameter's state and what it is cut
// from. Where a value does not fit every rank throws the same Error: shapes, dtypes, names of states, members that lack
// what others have, steps. (PyTorch checks only flat parameters; with use_orig_params it cuts wrong sizes silently.)
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/optim/optimizer.h"
#include "tessera/state/fsdp1/units.h"
#include "tessera/state/state_value.h"

namespace tessera {

// State of one parameter of the optimizer, under all original names that it stands for.
struct FlattenedOptimEntry {
  std::vector<std::string> unflat_param_names;
  std::string parameter;  // its name in Module::named_parameters
  bool is_fsdp_managed = true;
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
  std::shared_ptr<comm::Group> group = {};  // the FSDP group by default
};

// COLLECTIVE over the group. Errors kShape with upstream's texts.
FlattenedOptimState flatten_optim_state_dict(const Fsdp1Units& model, const StateDict& optim_state_dict,
                                             const FlattenOptions& options);

// The states of the members of one unit that have any, by member.
using UnitStates = std::map<size_t, StateDict>;
// Checks what flatten_optim_state and shard_orig_param_state assume. No communication.
void check_unit_states(const Fsdp1Unit& unit, const UnitStates& states);

// One flat parameter's state: tensors with dims become this rank's shard ([sharded_numel], the whole without sharding),
// members without the state count as zeros; others must be the same in all members. Results on the CPU. Empty when
// `states` is. COLLECTIVE over the unit's group for sharded values.
StateDict flatten_optim_state(const Fsdp1Unit& unit, const UnitStates& states);
// One original parameter's state: this rank's range of tensors with dims, 1-d, other values as they are. Empty where
// the rank has nothing of the parameter. COLLECTIVE over the unit's group for sharded values, also then.
StateDict shard_orig_param_state(const Fsdp1Unit& unit, size_t member, const StateDict& state);

// Keyed as the optimizer with these parameters (in the order of their ids) keeps it: by id, or by name. What the
// optimizer does not train is left out with a warning. Error kShape: a parameter group names an unknown parameter.
StateDict rekey_flattened(const FlattenedOptimState& flat, const Fsdp1Units& model,
                          const std::vector<std::string>& optimizer_parameters, bool by_name);

}  // namespace tessera
