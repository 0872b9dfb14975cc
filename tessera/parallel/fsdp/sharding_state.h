// The state that sharding attaches to a module: its parameter group and the hooks around its forward. The base of
// FsdpState (fully_shard) and Fsdp1State (wrap_fsdp1).
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/nn/module.h"
#include "tessera/parallel/data_parallel/data_parallel_state.h"
#include "tessera/parallel/data_parallel/mixed_precision.h"
#include "tessera/parallel/fsdp/fsdp_comm_schedule.h"
#include "tessera/parallel/fsdp/sharded_param_group.h"

namespace tessera {

class ShardingState : public DataParallelState, public std::enable_shared_from_this<ShardingState> {
 public:
  // `group` is null if nested fully_shard or wrap_fsdp1 calls manage all parameters of the module.
  ShardingState(nn::Module& module, MixedPrecisionPolicy policy, std::shared_ptr<ShardedParamGroup> group);
  void install_hooks();

  ShardedParamGroup* param_group() const { return group_.get(); }
  FsdpCommSchedule* schedule() const { return schedule_.get(); }
  bool synchronizes() const override { return !group_ || group_->synchronize; }
  void set_synchronize(bool on) override;
  void set_gradient_divisor(double factor) override;
  void set_reshard_after_backward(bool on);
  void set_is_last_backward(bool on);  // for all modules below its root
  // In the first forward, makes this module the root of all sharded modules below it, unless a module above it is its
  // root already. COLLECTIVE as init_root.
  void lazy_init();

 protected:
  using NamedState = std::pair<std::string, ShardingState*>;
  // lazy_init() calls init_root() on the root before the root's first forward. init_root() checks the states of the
  // root and of all modules below it, which `states` lists with their paths. Returns whether FsdpCommSchedule
  // prefetches all-gathers; the result is the same on all ranks.
  virtual bool init_root(const std::vector<NamedState>& states) = 0;
  virtual bool reshards_after_forward(bool is_root, bool backward_follows) const = 0;

 private:
  void before_forward(nn::TensorRefs& inputs);
  void after_forward(nn::TensorRefs& outputs);
  void watch_inputs(const nn::TensorRefs& inputs);
  std::vector<at::Tensor> unsharded_parameters();

  nn::Module& module_;
  MixedPrecisionPolicy policy_;
  std::shared_ptr<ShardedParamGroup> group_;
  std::shared_ptr<FsdpCommSchedule> schedule_;
  bool root_ = false;
  bool is_last_backward_ = true;
};

// The states of the module and all modules below it, outermost first.
inline std::vector<ShardingState*> sharding_states(nn::Module& module) { return states_below<ShardingState>(module); }

}  // namespace tessera
