// The state of one optimizer as torch.optim's state_dict() shows it: parameters are numbered over the groups.
//
//   StateDict saved = optimizer_state_dict(*optimizer);
//   // {"state": {0: {"exp_avg": ..., "exp_avg_sq": ..., "step": ...}, ...},
//   //  "param_groups": [{"lr": 0.001, "betas": (0.9, 0.999), ..., "params": [0, 1]}, ...]}
//   load_optimizer_state_dict(*other, saved);
//
// torch.optim.AdamW and SGD load such a dict and go on training, and theirs load here. Beside their values there are
// `master`, the float32 copy of a 16-bit parameter, and SGD's `step`; PyTorch keeps what it does not know.
//
// No communication. Belongs to the rank of the optimizer.
#pragma once

#include <string>
#include <vector>

#include "tessera/optim/optimizer.h"
#include "tessera/state/state_value.h"

namespace tessera {

// Names of the parameters by id: param_groups() in order.
std::vector<std::string> optimizer_parameter_names(const optim::Optimizer& optimizer);

// States share memory with the optimizer and lie as its parameters do (DTensors of DTensors). Every parameter that
// requires a gradient has an entry, before the first step as well (zeros, step 0); frozen ones that never were trained
// have none.
StateDict optimizer_state_dict(const optim::Optimizer& optimizer);

// Copies values into the optimizer and takes over hyper-parameters. A parameter without an entry is as before its first
// step; so is a state that an entry lacks or has as None, except that `master` then follows the parameter. A value for
// a DTensor is one that lies alike, or the whole as a plain tensor, from which this rank's part is cut. Values are
// converted to the dtype of the optimizer's state. optimizer.steps() becomes the largest `step`. Entries of numbers
// that are no parameter, and states that this optimizer has not, are left out. Errors, before anything is changed:
// kShape for another number of groups, groups of other sizes, values of another shape, layout or type, param_names that
// are this optimizer's in another order; kConfig from set_hyperparameters.
void load_optimizer_state_dict(optim::Optimizer& optimizer, const StateDict& state_dict);

}  // namespace tessera
