// The adapters of a Linear, laid as its weight needs them.
#pragma once

#include "tessera/parallel/tensor_parallel/style.h"

namespace tessera::detail {

// Of an nn::LoraLinear whose weight is Shard(0): A is replicated, B and magnitudes Shard(0); Shard(1): A is Shard(1), B
// and magnitudes are replicated; Replicate: all are. Their gradients are reduced to that where gradients of data
// parallelism are. Other modules are left alone. COLLECTIVE as StyleContext::distribute.
void distribute_adapters(nn::Module& module, const Placement& weight, const StyleContext& context);

}  // namespace tessera::detail
