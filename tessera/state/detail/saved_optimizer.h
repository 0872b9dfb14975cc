// Of a saved dict, by name or flat, of any number of optimizers, what belongs to one optimizer. No communication.
#pragma once

#include <string>
#include <vector>

#include "tessera/state/state_value.h"

namespace tessera::detail {

struct NamedParameterState {
  std::vector<std::string> names;  // a shared parameter has several; any of them may be saved
  bool wants_state = true;         // needs a gradient
};
using GroupNames = std::vector<NamedParameterState>;  // of one group

struct OptimizerNames {
  std::vector<GroupNames> groups;
  bool is_stateless = false;  // no parameter needs a saved state
};
// By id, in the groups of each optimizer: what load_optimizer_state_dict takes. `saved` may be by id itself. strict: a
// parameter that wants a state must have one. Time is linear in all of it. Errors kShape: see set_optimizer_state_dict.
std::vector<StateDict> select_optimizers(const StateDict& saved, const std::vector<OptimizerNames>& optimizers,
                                         bool strict);

}  // namespace tessera::detail
