// What all ranks have of an optimizer's state, as each rank says before tensors move: names, shapes, dtypes and
// scalars. From it every rank comes to the same decisions and the same errors. Internal to state/fsdp1.
#pragma once

#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/fsdp1/state/units.h"
#include "tessera/state/state_value.h"

namespace tessera {

// The dict "state" of an optimizer's dict. Error kShape, which begins with `where`, when there is none.
const StateDict& states_of(const StateDict& optim_state_dict, const char* where);

// An optimizer's dict with its parameters found.
struct LocalStates {
  std::vector<std::pair<const Fsdp1Units::Parameter*, const StateDict*>> entries;  // in the order of the ids
  std::unordered_map<const Fsdp1Units::Parameter*, const StateDict*> by_parameter;
  std::vector<StateKey> user_keys;

  // Null when this rank has no state of the parameter.
  const StateDict* state_of(const Fsdp1Units::Parameter* parameter) const {
    const auto found = by_parameter.find(parameter);
    return found == by_parameter.end() ? nullptr : found->second;
  }
};
// Errors kShape: ids of no parameter, states that are no dicts or do not lie as the parameter on this rank.
LocalStates find_local_states(const Fsdp1Units& model, const std::vector<std::string>& optimizer_parameters,
                              const StateDict& saved);

// State of one parameter: what is the same on all ranks that have part of it.
struct AgreedState {
  std::map<std::string, c10::ScalarType> tensors;  // with dims
  StateDict others;                                // tensors without dims, then other values, each sorted by name
};
struct AgreedStates {
  std::vector<const Fsdp1Units::Parameter*> parameters;        // that have state anywhere, in the order of the result
  std::map<const Fsdp1Units::Parameter*, AgreedState> states;  // of those of FSDP units
};
// COLLECTIVE over the group; throws the same Error kShape on all ranks.
AgreedStates agree_on_states(const Fsdp1Units& model, const LocalStates& local, comm::Group& group);

// This rank's elements of a member (`index` among the parameter's) in its own state `name`, 1-d in storage order; none
// where it has no part. A view where possible. `state`: this rank's of the parameter, or null.
at::Tensor saved_piece(const Fsdp1Units& model, const Fsdp1Units::Parameter& parameter, size_t index,
                       const StateDict* state, const std::string& name, c10::ScalarType dtype);

}  // namespace tessera
