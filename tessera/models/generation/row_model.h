// A model in the form that generation computes with: what a token gets does not depend on the tokens beside it.
//
//   auto model = from_pretrained(dir, at::kBFloat16);
//   make_row_model(*model, kernels::RowDtype::kInt8);           // for good: forward only, no derivative, no state dict
//
// Projections, MLPs, experts and head are exchanged for twins that compute with kernels/linear/row_product.h, norms and
// hidden states are fp32, angles come from a table, so that greedy tokens are the same for a sequence alone, among
// others, or in blocks of any size. Weights lie in memory as `dtype` says, but of kInt4 the head is kInt8 as in most
// GGUF files; what they are exchanged for is freed.
#pragma once

#include "tessera/kernels/linear/row_product.h"
#include "tessera/models/decoder/causal_lm.h"

namespace tessera {

// Error kConfig: a model that is not whole and plain on the CPU.
void make_row_model(CausalLM& model, kernels::RowDtype dtype);
// The dtype in which the parameters lie: bfloat16 as it is, all others as float32.
kernels::RowDtype stored_row_dtype(CausalLM& model);

}  // namespace tessera
