// Expert parallelism: the experts of each layer are sharded over ranks, and an all-to-all sends the tokens to the ranks
// that hold their experts.
//
//   const auto moe = make_expert_mesh(stage, /*ep=*/4);                       // (ep_shard, ep)
//   apply_expert_parallel(*model, {.mesh = moe, .tensor_parallel = tp});      // after the plan of tensor parallelism
//   shard_experts(*model, moe, {.mp_policy = policy});                        // before fully_shard of the layers
//   for (auto& layer : model->blocks()) fully_shard(*layer, {.mesh = dp});    // does not shard the experts again
//
// Each rank holds experts / ep of the experts of a layer, as DTensors Shard(0) over ep, and all routers. The tokens of
// the ranks along ep are sorted by expert, sent with an uneven all-to-all to the ranks that hold their experts, and the
// results are sent back and weighted on the ranks of the tokens. Per layer and direction a rank sends at most (its
// tokens x experts per token x width) elements to other ranks. Every rank calls every all-to-all, even without tokens.
// An expert without tokens gets a gradient of zeros.
//
// The ranks along ep_shard hold the same experts and different tokens. shard_experts shards the experts over them
// (FSDP). Gradients are summed, as the trainer does for all parameters (set_gradient_divide_factor(model, 1)). Thus the
// gradients of experts, like those of all other parameters, are sums over the tokens of all ranks, and experts need no
// extra scaling factor. See docs/design/experts.md.
#pragma once

#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/experts/moe.h"
#include "tessera/parallel/fsdp/fully_shard.h"

namespace tessera {

// Makes the mesh (ep_shard, ep) over all ranks of `stage`, a mesh with dims among (dp_replicate, dp_shard, cp, tp). The
// ranks of `stage` are taken in row-major order and divided into rows of `ep` neighbouring ranks. Errors kConfig where
// ep does not divide the number of ranks; kShape where this rank is not part of `stage`. No communication.
MeshPtr make_expert_mesh(const MeshPtr& stage, int64_t ep);

struct ExpertParallelOptions {
  MeshPtr mesh = {};  // (ep_shard, ep), by these names
  // The 1-d tensor-parallel mesh. Its ranks hold the same tokens, so each rank routes and sends only its share of them.
  // Null: no tensor parallelism. A model with tensor parallelism needs this mesh even if ep is 1.
  MeshPtr tensor_parallel = {};
  bool sequence_parallel = false;  // the residual stream is a DTensor Shard(1) over tensor_parallel
};
// Runs only the checks of apply_expert_parallel and changes nothing. Errors as apply_expert_parallel.
void check_expert_parallel(nn::Module& model, const ExpertParallelOptions& options);
// Shards the experts of every nn::MoE below `model` over ep and sets its token exchange. All options and capacities are
// checked before anything changes. Errors kConfig: a number of experts that ep does not divide, experts with a capacity
// together with tensor parallelism; kShape: a mesh other than (ep_shard, ep), experts that are DTensors already. No
// communication.
void apply_expert_parallel(nn::Module& model, const ExpertParallelOptions& options);

// The nn::Experts modules below `model`, in order. shard_experts() calls fully_shard on each of them.
std::vector<nn::Module*> expert_units(nn::Module& model);
// Calls fully_shard on each of expert_units(model) over the dim ep_shard of `mesh`. The parameters become
// (StridedShard(0), Shard(0)) over (ep_shard, ep). The mesh and the output_dtype in `options` are ignored. COLLECTIVE
// as fully_shard.
void shard_experts(nn::Module& model, const MeshPtr& mesh, FullyShardOptions options);

// Sums the router counts of one step over all ranks and stores the sums in `statistics`. Returns the load-balance loss,
// float64 [], equal on all ranks. COLLECTIVE over `group`, which holds all ranks of the run including other pipeline
// stages; a rank without a router passes statistics for the same number of experts. `device`: the model's device. If
// the group supports tensors of that device, the sums stay there and the host does not wait; otherwise they are
// exchanged through host memory.
at::Tensor reduce_router_statistics(nn::RouterStatistics& statistics, comm::Group& group,
                                    c10::Device device = c10::kCPU);

}  // namespace tessera
