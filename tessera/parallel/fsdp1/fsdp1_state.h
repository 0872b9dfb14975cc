// What wrap_fsdp1 attaches to a module.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/nn/module.h"
#include "tessera/parallel/detail/gathered_state.h"
#include "tessera/parallel/fsdp1/flat_group.h"
#include "tessera/parallel/fsdp1/fully_sharded_data_parallel.h"

namespace tessera::parallel {

class Fsdp1State : public GatheredState {
 public:
  // The group is null when nested calls have all parameters.
  Fsdp1State(nn::Module& module, ShardingStrategy strategy, std::shared_ptr<FlatGroup> group)
      : GatheredState(module, {}, group), strategy_(strategy), group_(std::move(group)) {}

  const std::shared_ptr<FlatGroup>& group() const { return group_; }
  ShardingStrategy strategy() const { return strategy_; }

 private:
  bool begin_root(const std::vector<Named>&) override { return false; }
  bool reshards_after_forward(bool is_root, bool backward_follows) const override {
    return !backward_follows || (strategy_ == ShardingStrategy::kFullShard && !is_root);
  }

  ShardingStrategy strategy_;
  std::shared_ptr<FlatGroup> group_;
};

// Those of the module and all below it with their paths, outermost first.
std::vector<std::pair<std::string, Fsdp1State*>> fsdp1_states(nn::Module& module);

}  // namespace tessera::parallel
