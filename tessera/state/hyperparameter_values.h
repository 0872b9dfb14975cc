// Converts the hyper-parameters of a parameter group to values of a state dict, and back.
#pragma once

#include "tessera/optim/optimizer.h"
#include "tessera/state/state_value.h"

namespace tessera {

StateValue to_state_value(const optim::Hyperparameter& value);  // lists become tuples, such as betas
StateDict to_state_dict(const optim::Hyperparameters& hyperparameters);
// Returns all hyper-parameters of a saved group, without params and param_names. Tensors of one element become numbers.
// A value that no optimizer here can hold (a dict, a larger tensor) is left out with a warning.
optim::Hyperparameters hyperparameters_of(const StateDict& group);
// Returns whether two groups have the same hyper-parameters; params and param_names are ignored.
bool same_hyperparameters(const StateDict& a, const StateDict& b);
// Returns whether the optimizer, with its present hyper-parameters, keeps no state for a parameter except the step.
bool keeps_no_state(const optim::Optimizer& optimizer);

}  // namespace tessera
