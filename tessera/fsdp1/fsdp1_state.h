// The object that wrap_fsdp1 attaches to a module: the parameter group and the settings of one FSDP1 unit.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "tessera/fsdp1/flat_param_group.h"
#include "tessera/fsdp1/fully_sharded_data_parallel.h"
#include "tessera/nn/module.h"
#include "tessera/parallel/fsdp/sharding_state.h"
#include "tessera/state/state_dict_handler.h"

namespace tessera {

struct StateDictSettings;  // fsdp1/state/state_dict_type.h

class Fsdp1State : public ShardingState, public StateDictHandler {
 public:
  // `group` is null when nested wrap_fsdp1 calls have flattened all parameters of `module`. The constructor registers
  // the forward-pre hook that casts inputs; call it before install_hooks(), because this hook must run first.
  Fsdp1State(nn::Module& module, ShardingStrategy strategy, MixedPrecision precision,
             std::shared_ptr<FlatParamGroup> group);

  // Overrides of StateDictHandler, defined in fsdp1/state/fsdp1_state_dict_handler.cc.
  bool has_parameters() const override { return group_ != nullptr; }
  StateDict get_model_state_dict(nn::Module& model, const StateDictOptions& options) const override;
  IncompatibleKeys set_model_state_dict(nn::Module& model, const StateDict& values,
                                        const StateDictOptions& options) const override;
  StateDict get_optimizer_state_dict(nn::Module& model, const std::vector<optim::Optimizer*>& optimizers,
                                     const StateDictOptions& options) const override;
  void set_optimizer_state_dict(nn::Module& model, const std::vector<optim::Optimizer*>& optimizers,
                                const StateDict& values, const StateDictOptions& options) const override;

  const std::shared_ptr<FlatParamGroup>& group() const { return group_; }
  ShardingStrategy strategy() const { return strategy_; }
  // The original dtype of each buffer that mixed precision has cast, by the module member that holds the buffer.
  const std::unordered_map<const at::Tensor*, c10::ScalarType>& buffer_dtypes() const { return buffer_dtypes_; }

  // Set by set_state_dict_type for this unit; null means the defaults.
  std::shared_ptr<const StateDictSettings> state_dict_settings;

 private:
  bool init_root(const std::vector<NamedState>& states) override;
  bool reshards_after_forward(bool is_root, bool backward_follows) const override {
    const bool frees = strategy_ == ShardingStrategy::kFullShard || strategy_ == ShardingStrategy::kHybridShard;
    return !backward_follows || (frees && !is_root);
  }
  void cast_inputs(const nn::TensorRefs& inputs);
  void cast_buffers(std::unordered_set<const at::Tensor*>& visited);

  nn::Module& wrapped_;
  ShardingStrategy strategy_;
  MixedPrecision precision_;
  bool is_root_ = false;
  std::unordered_map<const at::Tensor*, c10::ScalarType> buffer_dtypes_;
  std::shared_ptr<FlatParamGroup> group_;
};

// Returns each Fsdp1State of the module and of the modules below it, with the path of its module, outermost first.
std::vector<std::pair<std::string, Fsdp1State*>> fsdp1_states(nn::Module& module);

}  // namespace tessera
