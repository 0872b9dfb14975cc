// The state that fully_shard attaches to a module.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "tessera/nn/module.h"
#include "tessera/parallel/fsdp/fsdp_param_group.h"
#include "tessera/parallel/fsdp/fully_shard.h"
#include "tessera/parallel/fsdp/sharding_state.h"

namespace tessera {

class FsdpState : public ShardingState {
 public:
  // `group` is null if nested fully_shard calls manage all parameters of the module.
  FsdpState(nn::Module& module, const FullyShardOptions& options, std::shared_ptr<FsdpParamGroup> group);

  FsdpParamGroup* group() const { return group_; }
  void set_reshard_after_forward(bool on);
  void set_prefetch(bool on);

 private:
  bool init_root(const std::vector<NamedState>& states) override;  // COLLECTIVE over the states' meshes
  bool reshards_after_forward(bool is_root, bool backward_follows) const override;

  MeshPtr mesh_;
  std::optional<bool> reshard_after_forward_;
  std::optional<bool> prefetch_;
  const bool fixed_addresses_;
  FsdpParamGroup* group_;
};

// The states of the module and all modules below it, outermost first.
inline std::vector<FsdpState*> fsdp_states(nn::Module& module) { return states_below<FsdpState>(module); }

}  // namespace tessera
