// FSDP1 units that are made by hand, of one rank of a world whose other ranks do not exist. Whole tensors are flattened
// and sharded without communication.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/backends/fake_backend.h"
#include "tessera/comm/rendezvous/world.h"
#include "tessera/fsdp1/fully_sharded_data_parallel.h"
#include "tessera/fsdp1/state/units.h"

namespace tessera::testing {

class HandMadeHandle : public FlatParameterHandle {
 public:
  HandMadeHandle(FlatParameterLayout layout, std::shared_ptr<comm::Group> group, std::string prefix = "",
                 ShardingStrategy strategy = ShardingStrategy::kFullShard)
      : layout_(std::move(layout)), group_(std::move(group)), prefix_(std::move(prefix)), strategy_(strategy) {
    const bool sharded = strategy_ != ShardingStrategy::kNoShard;
    shard_ = at::zeros({sharded ? layout_.sharded_numel() : layout_.unpadded_numel()});
  }
  const FlatParameterLayout& layout() const override { return layout_; }
  const std::shared_ptr<comm::Group>& group() const override { return group_; }
  ShardingStrategy sharding_strategy() const override { return strategy_; }
  std::string prefix() const override { return prefix_; }
  at::Tensor shard() const override { return shard_; }
  std::vector<ShardParamInfo> shard_param_infos() const override {
    return strategy_ == ShardingStrategy::kNoShard ? layout_.whole_param_infos()
                                                   : layout_.shard_param_infos(group_->rank());
  }
  std::vector<std::string> parameter_names() const override {
    if (!layout_.use_orig_params()) return {prefix_ + "_flat_param"};
    std::vector<std::string> names;
    for (const auto& member : layout_.members()) names.push_back(prefix_ + member.fqn);
    return names;
  }
  std::vector<at::Tensor> parameters() const override {
    const auto leaf = [](bool requires_grad) { return at::zeros({0}).set_requires_grad(requires_grad); };
    if (!layout_.use_orig_params()) return {leaf(layout_.requires_grad())};
    std::vector<at::Tensor> leaves;
    for (const auto& member : layout_.members()) leaves.push_back(leaf(member.requires_grad));
    return leaves;
  }

 private:
  FlatParameterLayout layout_;
  std::shared_ptr<comm::Group> group_;
  std::string prefix_;
  ShardingStrategy strategy_;
  at::Tensor shard_;
};

struct HandMadeRank {
  HandMadeRank(int rank, int size)
      : world(comm::World::create_fake(rank, size, std::make_shared<comm::FakeCostAccount>())), group(world->group()) {}

  // Makes one unit of members with these names and shapes.
  std::shared_ptr<HandMadeHandle> handle(const std::vector<std::pair<std::string, std::vector<int64_t>>>& members,
                                         bool use_orig_params, const std::vector<SharedFlatMember>& shared = {},
                                         const std::string& prefix = "") const {
    std::vector<FlatMember> flat;
    for (const auto& [fqn, shape] : members) {
      flat.push_back({.fqn = fqn, .shape = shape, .strides = {}, .numel = numel_of(shape)});
    }
    auto layout = FlatParameterLayout::make(flat, shared, {.use_orig_params = use_orig_params}, group->size());
    return std::make_shared<HandMadeHandle>(std::move(layout), group, prefix);
  }

  std::shared_ptr<comm::World> world;
  std::shared_ptr<comm::Group> group;
};

}  // namespace tessera::testing
