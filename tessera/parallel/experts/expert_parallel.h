// Expert parallelism: the ranks of a mesh share the experts of each layer, and tokens travel to them.
//
//   const auto moe = make_expert_mesh(stage, /*ep=*/4);                       // (ep_shard, ep)
//   apply_expert_parallel(*model, {.mesh = moe, .tensor_parallel = tp});      // after the plan of tensor parallelism
//   shard_experts(*model, moe, {.mp_policy = policy});                        // before fully_shard of the layers
//   for (auto& layer : model->blocks()) fully_shard(*layer, {.mesh = dp});    // leaves experts alone
//
// Each rank holds experts / ep of the experts of a layer, as DTensors Shard(0) over ep, and all of the routers. The
// tokens of the ranks along ep are sorted by expert, sent with an all-to-all of uneven counts to the ranks that hold
// their experts, and the results sent back and weighted where the tokens are: per layer and direction a rank sends at
// most its tokens x experts chosen x width elements, those of experts that are elsewhere. Every rank takes part in
// every exchange, without tokens too; an expert without tokens gets a gradient of zeros.
//
// Along ep_shard ranks hold the same experts and other tokens: shard_experts shards them there (FSDP), and gradients
// are summed, as the trainer has it everywhere (set_gradient_divide_factor(model, 1)). So a gradient is that of the
// tokens of all ranks whatever the mesh, and needs no factor of its own. See docs/design/experts.md.
#pragma once

#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/experts/moe.h"
#include "tessera/parallel/fsdp/fully_shard.h"

namespace tessera {

// (ep_shard, ep) over all ranks of `stage`: its dims (dp_replicate, dp_shard, cp, tp) as one, of which ep varies
// fastest. Errors kConfig where ep does not divide the ranks; kShape where this rank is not part of the mesh. No
// communication.
MeshPtr make_expert_mesh(const MeshPtr& stage, int64_t ep);

struct ExpertParallelOptions {
  MeshPtr mesh = {};  // (ep_shard, ep), by these names
  // The dim of ranks that hold the same tokens, each of which then routes and sends its share of them; null: there is
  // none. Also where ep is 1: a model with tensor parallelism needs it.
  MeshPtr tensor_parallel = {};
  bool sequence_parallel = false;  // residuals are DTensors Shard(1) over it
};
// The checks of apply_expert_parallel alone; changes nothing.
void check_expert_parallel(nn::Module& model, const ExpertParallelOptions& options);
// Of all nn::MoE below `model`. Checks everything first. Errors kConfig: experts that ep does not divide, a capacity of
// experts with tensor parallelism; kShape: a mesh without these dims, parameters that are DTensors already. No
// communication.
void apply_expert_parallel(nn::Module& model, const ExpertParallelOptions& options);

// The nn::Experts below `model`, in order: units of FSDP of their own.
std::vector<nn::Module*> expert_units(nn::Module& model);
// fully_shard of each of them over ep_shard of `mesh`: parameters lie as (StridedShard(0), Shard(0)) over (ep_shard,
// ep). The mesh in `options` does not count, nor its output_dtype. COLLECTIVE as fully_shard.
void shard_experts(nn::Module& model, const MeshPtr& mesh, FullyShardOptions options);

// Adds up what the routers of all ranks of a step have counted and tells this rank's statistics. Returns the
// load-balance loss, float64 [], alike on all ranks. COLLECTIVE over `group`: all ranks of the run, those of other
// pipeline stages too (one without a router passes statistics of its own, of as many experts). `device`: where the
// model computes; where the group carries that device's tensors, all stays there and no host waits, else the sums go
// over the host.
at::Tensor settle_router_statistics(nn::RouterStatistics& statistics, comm::Group& group,
                                    c10::Device device = c10::kCPU);

}  // namespace tessera
