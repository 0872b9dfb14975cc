// What fully_shard attaches to a module: its group of parameters and the hooks around its forward.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/nn/module.h"
#include "tessera/parallel/detail/data_parallel_state.h"
#include "tessera/parallel/detail/gather_schedule.h"
#include "tessera/parallel/detail/param_group.h"
#include "tessera/parallel/fully_shard.h"

namespace tessera::parallel {

class FsdpState : public DataParallelState, public std::enable_shared_from_this<FsdpState> {
 public:
  // The group is null when nested calls have all parameters.
  FsdpState(nn::Module& module, const FullyShardOptions& options, std::shared_ptr<ParamGroup> group);
  void install_hooks();

  ParamGroup* group() const { return group_.get(); }
  GatherSchedule* schedule() const { return schedule_.get(); }
  void set_reshard_after_forward(bool on) { reshard_after_forward_ = on; }
  void set_prefetch(bool on);
  bool synchronizes() const override { return !group_ || group_->synchronize; }
  void set_synchronize(bool on) override;
  void set_divide(double factor) override;
  // Makes this module the root of all sharded modules below it, if it has no root yet. COLLECTIVE over their meshes
  // then.
  void settle();

 private:
  void before_forward(nn::TensorRefs& inputs);
  void after_forward(nn::TensorRefs& outputs);
  void watch_inputs(const nn::TensorRefs& inputs);
  std::vector<at::Tensor> whole_parameters();

  nn::Module& module_;
  MeshPtr mesh_;
  MixedPrecisionPolicy policy_;
  std::optional<bool> reshard_after_forward_;
  std::optional<bool> prefetch_;
  std::shared_ptr<ParamGroup> group_;
  std::shared_ptr<GatherSchedule> schedule_;
  bool root_ = false;
};

// Null when fully_shard was not called on this module.
FsdpState* fsdp_state(const nn::Module& module);
// Those of the module and all below it, outermost first.
std::vector<FsdpState*> fsdp_states(nn::Module& module);

}  // namespace tessera::parallel
