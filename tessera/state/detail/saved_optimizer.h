// Selects from a saved optimizer dict (by name or flat, of any number of optimizers) the state of each optimizer. No
// communication.
#pragma once

#include <string>
#include <vector>

#include "tessera/state/state_value.h"

namespace tessera::detail {

struct NamedParameterState {
  std::vector<std::string> names;  // a shared parameter has several names; any of them may be in the dict
  bool wants_state = true;         // whether the parameter needs a gradient
};
using GroupNames = std::vector<NamedParameterState>;  // the parameters of one group

struct OptimizerNames {
  std::vector<GroupNames> groups;
  bool is_stateless = false;  // whether the optimizer needs no saved state for any parameter
};
// Returns one dict for each optimizer. The dict is by id (its states have parameter ids as keys) and has the parameter
// groups of the optimizer, as load_optimizer_state_dict requires. When there is only one optimizer, `saved` may be by
// id; `saved` is then returned unchanged. With `strict`, each parameter whose wants_state is true must have a saved
// state. The time is linear in the size of `saved` and of the groups. Errors kShape: see set_optimizer_state_dict.
std::vector<StateDict> select_optimizers(const StateDict& saved, const std::vector<OptimizerNames>& optimizers,
                                         bool strict);

}  // namespace tessera::detail
