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
//
// Where parameters stay gathered between forwards, each forward of the root asks whether shards have changed (a word to
// the other ranks) and gathers those groups again. Changes are known by tensor versions, which every in-place
// operation, load and optimizer here counts. After writing a shard through its data pointer, or with an operation that
// does not count (torch's _fused_*), call reshard().
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"
#include "tessera/parallel/data_parallel/gradient_sync.h"
#include "tessera/parallel/data_parallel/mixed_precision.h"

namespace tessera {

struct FullyShardOptions {
  MeshPtr mesh = {};                               // 1-d (shard), or 2-d (replicate, shard) with names
  std::optional<bool> reshard_after_forward = {};  // default: true, but false for the root
  MixedPrecisionPolicy mp_policy = {};
  // Beside tensor parallelism: plain parameters are alike on all ranks of this mesh, and the DTensors that they become
  // say so (Shard, Replicate); forward reads plain tensors. None: their DTensors lie over `mesh` alone.
  MeshPtr replicated_over = {};
  // Shards and their gradients lie in host memory (pinned, where the accelerator has such), so that optimizers keep
  // their state there and run there. Each gather copies shards to the mesh's device, each reduction gradients back.
  // FSDP2's CPUOffloadPolicy. On a CPU mesh it changes nothing.
  bool cpu_offload = false;
  // Whole parameters lie at the same addresses whenever they are gathered, for graphs of their module's kernels
  // (layer_graphs.h). Memory: two groups' parameters, all the time. On a CPU mesh it changes nothing.
  bool fixed_places = false;
};

// Shards the parameters of `module` that no nested fully_shard call manages already. Parameters may be DTensors of
// tensor parallelism, over another slice of the mesh that `mesh` is a slice of: what lies on a rank is sharded then, as
// (StridedShard, Shard) or (Shard, Shard(1)); forward sees DTensors as before, and gradients are brought to the
// parameter's placements before they are reduced. Parameters may be on the meta
// device: then their shards are too, until materialised (to_empty and load, or init). Shards lie in memory that the
// ranks of one host gather from in place, so COLLECTIVE over the shard dim where that makes its group.
// Errors kShape: mesh of other than 1 or 2 dims, scalar or non-contiguous parameters, a module sharded twice, a
// parameter tied to one of another group, a DTensor over a mesh of other origin or with other placements than Shard and
// Replicate.
void fully_shard(nn::Module& module, const FullyShardOptions& options);
// Whether fully_shard was called on this module or one below it.
bool is_fully_sharded(nn::Module& module);

// Gives parameters and buffers on the meta device uninitialised memory on `device`, sharded ones their shard only. They
// become new tensors: call it before making an optimizer. Initialise or load them next. COLLECTIVE as fully_shard.
void to_empty(nn::Module& module, c10::Device device);

// A switch of one module and, when recurse is set, all sharded modules below it. Those for gradients are in
// gradient_sync.h; without synchronisation gradients accumulate unsharded.
void set_reshard_after_forward(nn::Module& module, bool on, bool recurse = true);
// Whether parameters are freed after their backward (default), or stay gathered for the next forward. Memory: the whole
// parameters. Whether forward frees them is set_reshard_after_forward's.
void set_reshard_after_backward(nn::Module& module, bool on, bool recurse = true);
// false: the backwards that come leave the reductions of their gradients under way, until one with true ends them all;
// gradients may be read, and optimizers stepped, after that one only. Of all modules below the root of `module`.
void set_is_last_backward(nn::Module& module, bool on);
// Called whenever the parameters of one fully_shard call at or below `module` have been handed what a backward gave
// them (the sums over all ranks, added to what grad() had), with those DTensors: on the thread of that backward, group
// by group while it goes on, in the same order on all ranks. It may read, change and free gradients, and update these
// parameters; it must not communicate. For optimizers that step in backward. Empty: none. Error kShape when no module
// here is sharded.
using GradientsHook = std::function<void(const std::vector<at::Tensor>& parameters)>;
void set_gradients_hook(nn::Module& module, const GradientsHook& hook);
// Gathers or frees by hand; unshard is COLLECTIVE over the mesh.
void unshard(nn::Module& module);
void reshard(nn::Module& module);
// Turns prefetch (gather of the next group while this one computes) on or off. Call it alike on all ranks: it changes
// the order of collectives, so ranks that differ wait for one another until the timeout; before the first forward a
// difference is an Error kShape there. Default, agreed on by all ranks in the first forward: on when every host has a
// core for each of its ranks, by CPU affinity, and on accelerators.
void set_prefetch(nn::Module& module, bool on);

struct FsdpStats {
  int64_t all_gathers = 0;
  // Of these, with shards that had to be put together first (parameters replaced by a load).
  int64_t piecewise_gathers = 0;
  int64_t reduce_scatters = 0;
  int64_t unsharded_groups = 0;       // now
  int64_t peak_unsharded_groups = 0;  // since reset
  int64_t unsharded_bytes = 0;
  int64_t accumulated_bytes = 0;  // of whole gradients that wait for a backward with synchronisation, now
};
FsdpStats fsdp_stats(nn::Module& root);
void reset_fsdp_stats(nn::Module& root);

}  // namespace tessera
