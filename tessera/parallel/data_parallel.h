// Data parallelism of a whole model in one call: the mesh says which kind.
//
//   std::vector<nn::Module*> blocks;
//   for (auto& layer : model->layers) blocks.push_back(layer.get());
//   auto mesh = init_device_mesh(world, "cpu", {2, 4}, {"dp_replicate", "dp_shard"});
//   data_parallel(*model, blocks, {.mesh = mesh});          // (n, 1): DDP, (1, n): FSDP, else HSDP
#pragma once

#include <vector>

#include "tessera/parallel/ddp/replicate.h"
#include "tessera/parallel/fsdp/fully_shard.h"

namespace tessera {

// fully_shard on each block, then on the root for what is left. options.reshard_after_forward, when given, is for the
// blocks; the root decides as fully_shard does by default. COLLECTIVE as fully_shard, in the order of the blocks.
void fully_shard_blocks(nn::Module& root, const std::vector<nn::Module*>& blocks, const FullyShardOptions& options);

struct DataParallelOptions {
  MeshPtr mesh = {};  // with a dim dp_replicate, dp_shard or both; others (tp) are left alone
  MixedPrecisionPolicy mp_policy = {};
  // What only one of the ways takes; mesh and mp_policy are those above.
  FullyShardOptions shard = {};
  ReplicateOptions replicate = {};
};

// Data parallelism as the mesh says: replicate(root) when there are several replicas of one shard, else
// fully_shard_blocks over dp_shard, with replicas over dp_replicate. Gradients are averaged over both dims. COLLECTIVE
// over the mesh where its groups are not made yet. Error kShape for a mesh with neither dim.
void data_parallel(nn::Module& root, const std::vector<nn::Module*>& blocks, const DataParallelOptions& options);

}  // namespace tessera
