// How a model is laid out over ranks, in one call.
//
//   std::vector<nn::Module*> blocks;
//   for (auto& layer : model->layers) blocks.push_back(layer.get());
//   fully_shard_blocks(*model, blocks, {.mesh = dp});
#pragma once

#include <vector>

#include "tessera/parallel/fully_shard.h"

namespace tessera {

// fully_shard on each block, then on the root for what is left. options.reshard_after_forward, when given, is for the
// blocks; the root decides as fully_shard does by default. No communication.
void fully_shard_blocks(nn::Module& root, const std::vector<nn::Module*>& blocks, const FullyShardOptions& options);

}  // namespace tessera
