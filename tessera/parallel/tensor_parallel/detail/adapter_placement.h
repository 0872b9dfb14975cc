// Placements of a Linear's LoRA adapter and packed weight, which follow the placement of the Linear's weight.
#pragma once

#include "tessera/nn/layers.h"
#include "tessera/parallel/tensor_parallel/style.h"

namespace tessera::detail {

// The sizes [out, in] of the Linear's weight, which is a parameter or a packed weight.
std::pair<int64_t, int64_t> weight_sizes(nn::Linear& linear);
// Distributes the adapter of an nn::LoraLinear by the placement of its weight. Weight Shard(0): A is replicated, B and
// the magnitudes are Shard(0). Weight Shard(1): A is Shard(1), B and the magnitudes are replicated. Weight Replicate:
// all are replicated. The adapter's gradients are redistributed to these placements before data parallelism reduces
// them. A packed weight stays whole on every rank; the mesh and placement are recorded in it. Other modules are not
// changed. COLLECTIVE as StyleContext::distribute.
void distribute_adapter(nn::Module& module, const Placement& weight, const StyleContext& context);

}  // namespace tessera::detail
