// The adapters of a Linear and its packed weight, laid as its weight is.
#pragma once

#include "tessera/nn/layers.h"
#include "tessera/parallel/tensor_parallel/style.h"

namespace tessera::detail {

// [out, in] of its weight, be it a parameter or packed.
std::pair<int64_t, int64_t> weight_sizes(nn::Linear& linear);
// Of an nn::LoraLinear whose weight is Shard(0): A is replicated, B and magnitudes Shard(0); Shard(1): A is Shard(1), B
// and magnitudes are replicated; Replicate: all are. Their gradients are reduced to that where gradients of data
// parallelism are. A packed weight, which is whole on every rank, is told so. Other modules are left alone. COLLECTIVE
// as StyleContext::distribute.
void distribute_beside(nn::Module& module, const Placement& weight, const StyleContext& context);

}  // namespace tessera::detail
