// Fully sharded data parallelism in the style of FSDP2. Parameters are DTensors sharded on dim 0. The parameters of one
// fully_shard call form a parameter group: the group is all-gathered for its forward and backward, and its gradients
// are reduce-scattered.
//
//   for (auto& layer : model->layers) fully_shard(*layer, {.mesh = dp});
//   fully_shard(*model, {.mesh = dp});                    // the root: the remaining embeddings, final norm, head
//   auto loss = (*model)(batch);                          // COLLECTIVE over the mesh
//   loss.backward();                                      // COLLECTIVE over the mesh; gradients are DTensors
//
// Apply fully_shard bottom-up. Semantics of torch.distributed.fsdp.fully_shard. The module owns its sharding state. A
// module belongs to one rank.
//
// Parameters that stay gathered between two forwards can become stale when their shards change. Each forward of the
// root therefore checks the tensor versions of the shards (with one small all-reduce over the ranks) and gathers a
// changed group again. Every in-place operation, every load and every optimizer of this library increments the tensor
// version. After writing to a shard through its data pointer, or with an operation that does not increment the version
// (torch's _fused_* optimizers), call reshard().
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
  std::optional<bool> reshard_after_forward = {};  // default: true; false for the root before a backward
  MixedPrecisionPolicy mp_policy = {};
  // The tensor-parallel mesh on whose ranks plain parameters have equal values. If it is set, fully_shard turns a plain
  // parameter into a DTensor (Shard, Replicate) over `mesh` and this mesh, and forward still reads a plain tensor.
  // Null: plain parameters become DTensors over `mesh` alone.
  MeshPtr replicated_over = {};
  // Keeps shards and their gradients in host memory (pinned, if the accelerator supports pinned memory), so optimizers
  // keep their state and run there. Each all-gather first copies the shards to the mesh's device, and each reduction
  // ends with a copy of the gradients to the host. Semantics of FSDP2's CPUOffloadPolicy. On a CPU mesh nothing
  // changes.
  bool cpu_offload = false;
  // Gathers the unsharded parameters to the same addresses each time, as CUDA graphs of the module's kernels need
  // (layer_graphs.h). The memory for unsharded parameters then stays allocated. All parameter groups that are resharded
  // after forward and after backward share two buffers; each other group has one buffer of its own
  // (fixed_address_buffers.h). On a CPU mesh nothing changes.
  bool fixed_addresses = false;
};

// Shards the parameters of `module` that no nested fully_shard call manages. A parameter may be a DTensor of tensor
// parallelism over another slice of the same parent mesh. Its local tensor is sharded then, and the parameter's
// placements become (StridedShard, Shard) or (Shard, Shard(1)). Forward reads the same DTensor as before, and a
// gradient is redistributed to the parameter's tensor-parallel placements before the reduction.
//
// Parameters may be on the meta device. Their shards are on the meta device, too, until to_empty() allocates them and
// the caller loads or initialises them. The shards are allocated in memory from which the ranks of one host can gather
// without a copy, so the call is COLLECTIVE over the shard dim if the process group of that dim does not exist yet.
//
// Errors kShape: no mesh, a mesh that does not have 1 or 2 dims or does not contain this rank, a 2-d mesh without dim
// names, scalar or non-contiguous parameters, parameters of which only some are on the meta device, a module that is
// sharded already or has replicate or wrap_fsdp1 below it, a parameter tied to a parameter of another group, a DTensor
// over a mesh that is not a slice of the same parent or with placements other than Shard and Replicate.
void fully_shard(nn::Module& module, const FullyShardOptions& options);
// Whether fully_shard was called on this module or on a module below it.
bool is_fully_sharded(nn::Module& module);

// Allocates the parameters and buffers that are on the meta device on `device`, without initialising them. A sharded
// parameter gets its shard only. The parameters become new tensors, so call to_empty before making an optimizer, and
// initialise or load the values next. COLLECTIVE as fully_shard. Error kShape if sharded parameters have a mesh of
// another device type.
void to_empty(nn::Module& module, c10::Device device);

// Sets whether parameters are resharded (freed) after forward. Applies to one module and, with recurse, to all sharded
// modules below it. This and the other setters below raise Error kShape if neither `module` nor a module below it is
// sharded. The switches for gradient reduction are in gradient_sync.h; gradients accumulate unsharded while gradient
// synchronisation is off.
void set_reshard_after_forward(nn::Module& module, bool on, bool recurse = true);
// true (default): parameters are resharded after their backward. false: they stay gathered for the next forward, which
// costs the memory of the unsharded parameters. set_reshard_after_forward is independent of this setting.
void set_reshard_after_backward(nn::Module& module, bool on, bool recurse = true);
// false: the next backwards do not wait for their gradient reductions, until a backward with true waits for all of
// them. Read gradients and step optimizers only after that last backward. Applies to all modules below the root of
// `module`.
void set_is_last_backward(nn::Module& module, bool on);
// Sets a hook that is called when a backward has written the gradients of one parameter group at or below `module`: the
// sums over all ranks are then added to grad(). The argument is the group's DTensor parameters. The hook runs on the
// thread of that backward, once for each group, before backward has ended, and in the same order on all ranks. It may
// read, change and free gradients, and update these parameters; it must not communicate. It is meant for optimizers
// that step in backward. An empty function removes the hook. Error kShape if no module at or below `module` is sharded.
using GradientsHook = std::function<void(const std::vector<at::Tensor>& parameters)>;
void set_gradients_hook(nn::Module& module, const GradientsHook& hook);
// Gathers (unshard) or frees (reshard) the parameters of one sharded module by hand. unshard is COLLECTIVE over the
// mesh. Error kShape if fully_shard was not called on this module itself.
void unshard(nn::Module& module);
void reshard(nn::Module& module);
// Turns prefetch on or off: the all-gather of the next group starts while this group computes. All ranks must pass the
// same value, because prefetch changes the order of collectives. If the values differ between ranks, the first forward
// raises Error kShape; if they differ after the first forward, ranks wait for one another until the timeout. Default:
// prefetch is on for accelerators, and on CPUs if every host has at least one CPU core (by affinity) for each of its
// ranks. All ranks agree on the default in the first forward.
void set_prefetch(nn::Module& module, bool on);

struct FsdpStats {
  int64_t all_gathers = 0;
  // The number of all-gathers for which the shards of this rank were separate tensors, because a load has replaced the
  // parameters. Such shards are first copied into one buffer.
  int64_t piecewise_gathers = 0;
  int64_t reduce_scatters = 0;
  int64_t unsharded_groups = 0;       // groups that are unsharded now
  int64_t peak_unsharded_groups = 0;  // their maximum since reset_fsdp_stats
  int64_t unsharded_bytes = 0;        // bytes of unsharded parameters now
  int64_t accumulated_bytes = 0;      // bytes of unsharded gradients that accumulate without synchronisation, now
};
// Returns the FsdpStats, summed over all FSDP root modules at or below `root`. Error kShape if no module at or below
// `root` is sharded.
FsdpStats fsdp_stats(nn::Module& root);
void reset_fsdp_stats(nn::Module& root);

}  // namespace tessera
