// The state of one optimizer in the form of torch.optim's state_dict(). The id of a parameter is its position over all
// groups.
//
//   StateDict saved = optimizer_state_dict(*optimizer);
//   // {"state": {0: {"exp_avg": ..., "exp_avg_sq": ..., "step": ...}, ...},
//   //  "param_groups": [{"lr": 0.001, "betas": (0.9, 0.999), ..., "params": [0, 1]}, ...]}
//   load_optimizer_state_dict(*other, saved);
//
// torch.optim.AdamW and SGD load such a dict and continue training, and load_optimizer_state_dict loads theirs. The
// dict has two states that PyTorch's does not have: `master`, the float32 copy of a 16-bit parameter, and SGD's `step`.
// PyTorch keeps states that it does not know.
//
// No communication. A dict has the state of one rank's optimizer only.
#pragma once

#include <string>
#include <vector>

#include "tessera/optim/optimizer.h"
#include "tessera/state/state_value.h"

namespace tessera {

// Returns the names of the parameters in the order of their ids, group after group of param_groups().
std::vector<std::string> optimizer_parameter_names(const optim::Optimizer& optimizer);

// Returns the optimizer's state dict, whose tensors share memory with the optimizer. States of a DTensor parameter are
// DTensors with the same layout. Every parameter that requires a gradient has an entry, also before the first step
// (zeros, step 0). A frozen parameter has an entry only when it was trained before.
StateDict optimizer_state_dict(const optim::Optimizer& optimizer);

// Copies the state into the optimizer and sets the hyper-parameters.
// - The states of a parameter without an entry are reset to their values before the first step. A state that is missing
//   or None in an entry is reset too; a missing `master` is copied from the parameter.
// - A value for a DTensor is a DTensor with the same layout, or the whole as a plain tensor, from which this
//   rank's shard is taken. Values are converted to the dtype of the optimizer's state.
// - optimizer.steps() becomes the largest `step`.
// - Entries whose id is in no group, and states that this optimizer does not have, are ignored.
// Errors, before anything is changed: kShape for another number of groups, for groups of other sizes, for values of
// another shape, layout or type, and for param_names that list this optimizer's parameters in another order; kConfig
// from set_hyperparameters.
void load_optimizer_state_dict(optim::Optimizer& optimizer, const StateDict& state_dict);

}  // namespace tessera
