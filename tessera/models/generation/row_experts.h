// Makes a mixture of experts whose result for a token does not depend on the other tokens of the call; see row_model.h.
#pragma once

#include <memory>

#include "tessera/kernels/linear/batch_invariant_linear.h"
#include "tessera/models/config/config.h"
#include "tessera/nn/experts/moe.h"

namespace tessera {

std::shared_ptr<nn::MoE> make_row_experts(const nn::MoE& from, const ModelConfig& config, kernels::WeightFormat dtype);

}  // namespace tessera
