// The state that fully_shard attaches to a module.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "tessera/nn/module.h"
#include "tessera/parallel/fsdp/fully_shard.h"
#include "tessera/parallel/fsdp/gathered_state.h"
#include "tessera/parallel/fsdp/param_group.h"

namespace tessera {

class FsdpState : public GatheredState {
 public:
  // The group is null when nested calls manage all parameters.
  FsdpState(nn::Module& module, const FullyShardOptions& options, std::shared_ptr<ParamGroup> group);

  ParamGroup* group() const { return group_; }
  void set_reshard_after_forward(bool on);
  void set_prefetch(bool on);

 private:
  bool begin_root(const std::vector<Named>& states) override;  // COLLECTIVE over the states' meshes
  bool reshards_after_forward(bool is_root, bool backward_follows) const override;

  MeshPtr mesh_;
  std::optional<bool> reshard_after_forward_;
  std::optional<bool> prefetch_;
  const bool fixed_places_;
  ParamGroup* group_;
};

// The states of the module and all modules below it, outermost first.
inline std::vector<FsdpState*> fsdp_states(nn::Module& module) { return states_below<FsdpState>(module); }

}  // namespace tessera
