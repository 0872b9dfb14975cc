// Loads a state dict into an optimizer in two steps. The first step checks the dict and decides which tensor goes
// where. The second step copies the values one by one, so that the values may be received from other ranks after the
// first step. No communication.
//
//   OptimizerLoad load = plan_optimizer_load(optimizer, dict);      // tensors of `dict` may be on the meta device
//   load.begin();
//   for (const auto& copy : load.copies()) load_tensor(copy.target, value_of(copy.source));
//   load.finish();
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tessera/optim/optimizer.h"
#include "tessera/state/state_value.h"

namespace tessera::detail {

class OptimizerLoad {
 public:
  struct StateCopy {
    size_t parameter;   // position in optimizer_parameter_names
    std::string state;  // set by begin()
    at::Tensor source;  // in the dict
    at::Tensor target;  // after begin()
  };
  const std::vector<StateCopy>& copies() const { return copies_; }

  // Sets the hyper-parameters, resets each state that has no value in the dict to its initial value, and sets
  // StateCopy::target.
  void begin();
  // Sets the step count of each parameter to the count in the dict, and the optimizer's own step count to the largest
  // of these.
  void finish();

 private:
  friend OptimizerLoad plan_optimizer_load(optim::Optimizer& optimizer, const StateDict& state_dict);
  struct ParameterPlan {
    std::string name;
    size_t group = 0;
    double step = 0;
    at::Tensor step_target = {};  // set by begin()
    size_t first_copy = 0, copies = 0;
  };
  void plan_state(ParameterPlan& parameter, size_t position, const StateValue& entry);
  void clone_aliased_sources();

  optim::Optimizer* optimizer_ = nullptr;
  std::vector<optim::Hyperparameters> groups_;
  std::vector<std::vector<std::string>> state_names_;  // of each group, with the hyper-parameters of the dict
  std::vector<ParameterPlan> parameters_;
  std::vector<StateCopy> copies_;
};

// Checks the dict and plans the load. The errors are those of load_optimizer_state_dict.
OptimizerLoad plan_optimizer_load(optim::Optimizer& optimizer, const StateDict& state_dict);

}  // namespace tessera::detail
