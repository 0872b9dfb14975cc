// Fully sharded data parallelism, FSDP2 style: parameters are DTensors sharded on dim 0; each group of them is
// gathered for its forward and backward, and its gradients are reduce-scattered.
//
//   for (auto& layer : model->layers) fully_shard(*layer, {.mesh = dp});
//   fully_shard(*model, {.mesh = dp});                    // the root: what is left (embeddings, final norm, head)
//   auto loss = (*model)(batch);                          // COLLECTIVE over the mesh
//   loss.backward();                                      // COLLECTIVE over the mesh; gradients are DTensors
//
// Apply bottom-up. Semantics of torch.distributed.fsdp.fully_shard. The module keeps its sharding state; it belongs to
// one rank.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"
#include "tessera/parallel/gradient_sync.h"
#include "tessera/parallel/mixed_precision.h"

namespace tessera {

struct FullyShardOptions {
  MeshPtr mesh = {};                               // 1-d (shard), or 2-d (replicate, shard) with names
  std::optional<bool> reshard_after_forward = {};  // default: true, but false for the root
  MixedPrecisionPolicy mp_policy = {};
};

// Shards the parameters of `module` that no nested fully_shard call manages already. Parameters may be on the meta
// device: then their shards are too, until materialised (to_empty and load, or init). Shards lie in memory that the
// ranks of one host gather from in place, so COLLECTIVE over the shard dim where that makes its group.
// Errors kShape: mesh of other than 1 or 2 dims, scalar or non-contiguous parameters, a module sharded twice, a
// parameter tied to one of another group.
void fully_shard(nn::Module& module, const FullyShardOptions& options);

// Gives parameters and buffers on the meta device uninitialised memory on `device`, sharded ones their shard only. They
// become new tensors: call it before making an optimizer. Initialise or load them next. COLLECTIVE as fully_shard.
void to_empty(nn::Module& module, c10::Device device);

// A switch of one module and, when recurse is set, all sharded modules below it. Those for gradients are in
// gradient_sync.h; without synchronisation gradients accumulate unsharded.
void set_reshard_after_forward(nn::Module& module, bool on, bool recurse = true);
// Gathers or frees by hand; unshard is COLLECTIVE over the mesh.
void unshard(nn::Module& module);
void reshard(nn::Module& module);
// Turns prefetch (gather of the next group while this one computes) on or off; default: on when there are at least as
// many cores as ranks on this host.
void set_prefetch(nn::Module& module, bool on);

struct FsdpStats {
  int64_t all_gathers = 0;
  int64_t reduce_scatters = 0;
  int64_t unsharded_groups = 0;       // now
  int64_t peak_unsharded_groups = 0;  // since reset
  int64_t unsharded_bytes = 0;
};
FsdpStats fsdp_stats(nn::Module& root);
void reset_fsdp_stats(nn::Module& root);

}  // namespace tessera
