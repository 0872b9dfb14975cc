// Makes a whole model data parallel in one call. The sizes of the mesh's dims choose between DDP, FSDP and HSDP.
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

// Calls fully_shard on each block, then on the root for the remaining parameters. options.reshard_after_forward applies
// to the blocks; the root keeps fully_shard's default. options.mp_policy.output_dtype applies to the root alone.
// COLLECTIVE as fully_shard, in the order of the blocks.
void fully_shard_blocks(nn::Module& root, const std::vector<nn::Module*>& blocks, const FullyShardOptions& options);

struct DataParallelOptions {
  MeshPtr mesh = {};  // has a dim dp_replicate, dp_shard or both; other dims (tp) are ignored
  MixedPrecisionPolicy mp_policy = {};
  // Options of fully_shard and of replicate. The fields mesh and mp_policy of both are ignored;
  // DataParallelOptions::mesh and mp_policy are used instead.
  FullyShardOptions shard = {};
  ReplicateOptions replicate = {};
};

// Calls replicate(root) when dp_replicate is above 1 and dp_shard is 1 or missing, or when the mesh has dp_replicate
// alone. Otherwise calls fully_shard_blocks over dp_shard, with replicas over dp_replicate if that dim is above 1.
// Gradients are averaged over both dims. COLLECTIVE over the mesh when its process groups do not exist yet. Error
// kShape for no mesh, or a mesh with neither dim.
void data_parallel(nn::Module& root, const std::vector<nn::Module*>& blocks, const DataParallelOptions& options);

}  // namespace tessera
