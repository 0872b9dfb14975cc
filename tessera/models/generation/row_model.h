// Converts a model for generation so that the result of a token does not depend on the other tokens of the call.
//
//   auto model = from_pretrained(dir, at::kBFloat16);
//   make_row_model(*model, kernels::WeightFormat::kInt8);  // permanent: forward only, no gradients, no state dict
//
// Projections, MLPs, experts and head are replaced by modules that compute with
// kernels/linear/batch_invariant_linear.h. Norms and hidden states are fp32, and rotary angles come from a table.
// Therefore greedy tokens are the same for a sequence alone, with other sequences, or in prompt blocks of any
// size. The new modules store their weights in memory as `dtype`, the argument of make_row_model(); with kInt4 the
// head is stored as kInt8, as in most GGUF files. The replaced modules are freed.
#pragma once

#include "tessera/kernels/linear/batch_invariant_linear.h"
#include "tessera/models/decoder/causal_lm.h"

namespace tessera {

// Converts `model` in place. Error kConfig unless all parameters are plain tensors (not DTensors) with values on the
// CPU.
void make_row_model(CausalLM& model, kernels::WeightFormat dtype);
// Returns the WeightFormat in which make_row_model() keeps the parameters as they are: kBFloat16 or kFloat16; for other
// dtypes kFloat32.
kernels::WeightFormat stored_row_dtype(CausalLM& model);

}  // namespace tessera
