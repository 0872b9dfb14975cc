// Packed weights (nn/linear/quantized_linear.h) where parameters are listed by name.
#pragma once

#include "tessera/models/tensors/local_part.h"

namespace tessera {

// Those of shared_parameters(), and behind them, in the order of nn::packed_weights(), one without slot for each packed
// weight: on the meta device, of the shape that it stands for, under the name that it would have.
std::vector<SharedParameter> parameters_and_packed(nn::Module& module);

}  // namespace tessera
