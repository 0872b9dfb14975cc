// Hyper-parameters of a group as values of a state dict, and back.
#pragma once

#include "tessera/optim/optimizer.h"
#include "tessera/state/state_value.h"

namespace tessera {

StateValue to_state_value(const optim::Hyperparameter& value);  // lists as tuples, as betas
StateDict to_state_dict(const optim::Hyperparameters& hyperparameters);
// All of a group but params and param_names; tensors of one element as numbers. What no optimizer here can hold (dicts,
// larger tensors) is left out with a warning.
optim::Hyperparameters hyperparameters_of(const StateDict& group);
// Whether two groups may be one: the same names and values, params and param_names aside.
bool same_hyperparameters(const StateDict& a, const StateDict& b);
// Whether the optimizer, with its hyper-parameters, keeps no state of any parameter but the step.
bool keeps_no_state(const optim::Optimizer& optimizer);

}  // namespace tessera
