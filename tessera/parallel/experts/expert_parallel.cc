#include "tessera/parallel/experts/expert_parallel.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/nn/modules_of.h"
#include "tessera/parallel/experts/token_exchange.h"

namespace tessera {
namespace {

void check_expert_mesh(const MeshPtr& mesh) {
  TESSERA_CHECK(mesh != nullptr && mesh->ndim() == 2 && mesh->has_dim("ep_shard") && mesh->has_dim("ep") &&
                    mesh->coordinate().has_value(),
                ErrorKind::kShape,
                "[parallel.experts] found {}, wanted a mesh (ep_shard, ep) that holds this rank. Make it with "
                "make_expert_mesh.",
                mesh ? mesh->to_string() : "no mesh");
}

void check_block(const std::string& path, nn::MoE& block, int64_t ranks, bool shards_sequences) {
  TESSERA_CHECK(block.capacity_factor() == 0 || !shards_sequences, ErrorKind::kConfig,
                "[parallel.experts] {}: found capacity_factor {} with tensor parallelism: the capacity is counted per "
                "whole sequence, but a rank routes only a part of each. Set it to 0, or parallel.tp to 1.",
                path, block.capacity_factor());
  TESSERA_CHECK(
      block.expert_count() % ranks == 0, ErrorKind::kConfig,
      "[parallel.experts] {}: num_experts ({}) must be divisible by EP size ({}). Choose another parallel.ep.", path,
      block.expert_count(), ranks);
  for (const auto& slot : block.experts->own_parameters()) {
    TESSERA_CHECK(
        !is_dtensor(slot.parameter), ErrorKind::kShape,
        "[parallel.experts] {}.experts.{}: found a DTensor with placements {}, wanted a plain parameter. Leave experts "
        "out of the tensor-parallel plan, and call apply_expert_parallel once.",
        path, slot.name, to_string(placements(slot.parameter)));
  }
}

}  // namespace

MeshPtr make_expert_mesh(const MeshPtr& stage, int64_t ep) {
  TESSERA_CHECK(stage != nullptr && stage->coordinate().has_value(), ErrorKind::kShape,
                "[parallel.experts] found {}, wanted a mesh that holds this rank. Make it with init_device_mesh.",
                stage ? stage->to_string() : "no mesh");
  TESSERA_CHECK(ep >= 1 && stage->size() % ep == 0, ErrorKind::kConfig,
                "[parallel.experts] {} ranks of data, context and tensor parallelism must be divisible by EP size "
                "({}). Choose another parallel.ep.",
                stage->size(), ep);
  return make_device_mesh(stage->world(), c10::DeviceTypeName(stage->device_type(), /*lower_case=*/true),
                          stage->ranks(), {stage->size() / ep, ep}, {"ep_shard", "ep"});
}

void check_expert_parallel(nn::Module& model, const ExpertParallelOptions& options) {
  check_expert_mesh(options.mesh);
  const auto& replicas = options.tensor_parallel;
  TESSERA_CHECK(!replicas || (replicas->ndim() == 1 && replicas->coordinate().has_value()), ErrorKind::kShape,
                "[parallel.experts] tensor_parallel: found {}, wanted a 1-d mesh that holds this rank. Slice one: "
                "mesh->slice({{\"tp\"}}).",
                replicas->to_string());
  TESSERA_CHECK(
      replicas || !options.sequence_parallel, ErrorKind::kConfig,
      "[parallel.experts] found sequence_parallel without a tensor_parallel mesh to shard sequences over. Set "
      "tensor_parallel, or sequence_parallel to false.");
  const int64_t ranks = options.mesh->size(options.mesh->dim_of("ep"));
  // With tensor parallelism a rank routes only its share of each sequence, so it cannot count a capacity per sequence.
  const bool shards_sequences = replicas && replicas->size() > 1;
  // All checks run before apply_expert_parallel changes the first block: an error leaves the model as it was.
  for (const auto& [path, block] : nn::modules_of<nn::MoE>(model)) check_block(path, *block, ranks, shards_sequences);
}

void apply_expert_parallel(nn::Module& model, const ExpertParallelOptions& options) {
  check_expert_parallel(model, options);
  const auto mesh = options.mesh->slice({"ep"});
  const auto& replicas = options.tensor_parallel;
  const auto exchange = std::make_shared<AllToAllExchange>(mesh, replicas, options.sequence_parallel);
  for (const auto& [path, block] : nn::modules_of<nn::MoE>(model)) {
    for (auto& slot : block->experts->own_parameters()) {
      // Every rank takes its experts from its own copy (no source rank): the parameters are equal on all ranks or on
      // the meta device.
      auto part = distribute_tensor(slot.parameter.detach(), mesh, {Shard(0)}, /*src_data_rank=*/std::nullopt);
      part.set_requires_grad(slot.parameter.requires_grad());
      nn::Module::set_parameter(slot, part);
    }
    block->gate->tokens_over = replicas;
    block->set_exchange(exchange);
  }
}

std::vector<nn::Module*> expert_units(nn::Module& model) {
  std::vector<nn::Module*> out;
  for (const auto& [path, block] : nn::modules_of<nn::MoE>(model)) out.push_back(block->experts.get());
  return out;
}

void shard_experts(nn::Module& model, const MeshPtr& mesh, FullyShardOptions options) {
  check_expert_mesh(mesh);
  options.mesh = mesh->slice({"ep_shard"});
  options.replicated_over = nullptr;
  options.mp_policy.output_dtype.reset();
  for (auto* unit : expert_units(model)) fully_shard(*unit, options);
}

at::Tensor reduce_router_statistics(nn::RouterStatistics& statistics, comm::Group& group, c10::Device device) {
  // An all-gather instead of an all-reduce: every rank adds the counts in rank order, so all ranks get the same bits.
  const auto own = statistics.sums(group.supports_device(device.type()) ? device : c10::Device(c10::kCPU));
  auto all = at::empty({group.size(), own.numel()}, own.options());
  comm::all_gather_into(group, all, own, "router statistics").wait();
  statistics.finish(all.sum(0));
  return statistics.loss();
}

}  // namespace tessera
