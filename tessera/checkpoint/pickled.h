// Values of a state dict that are no tensors, as Python pickles them. Internal to checkpoint.
//
//   write_object_record(to_pickle(StateTuple{{0.9, 0.95}}), sink);
//   StateValue betas = from_pickle(folder.object("optim.param_groups.w.betas"), "betas");
#pragma once

#include <string>

#include "tessera/formats/torch/pickle_value.h"
#include "tessera/state/state_value.h"

namespace tessera {

// Error kShape for a tensor in it.
PickleValue to_pickle(const StateValue& value);
// Error kFormat for what no state dict holds: sets, objects of a class, integers beyond 64 bits, dicts with other keys
// than text and integers. `name` is for the message.
StateValue from_pickle(const PickleValue& value, const std::string& name);

}  // namespace tessera
