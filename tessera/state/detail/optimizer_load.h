// Loading an optimizer's dict in two steps: what goes where is found out and checked first, values follow one by one,
// so that they may still be on their way from another rank. No communication.
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
  struct Copy {
    size_t parameter;   // position in optimizer_parameter_names
    std::string state;  // exp_avg
    at::Tensor source;  // in the dict
    at::Tensor target;  // after begin()
  };
  const std::vector<Copy>& copies() const { return copies_; }

  // Sets hyper-parameters; states that get no value are as before the first step.
  void begin();
  // Sets numbers of steps.
  void finish();

 private:
  friend OptimizerLoad plan_optimizer_load(optim::Optimizer& optimizer, const StateDict& state_dict);
  struct Parameter {
    std::string name;
    size_t group = 0;
    double step = 0;
    at::Tensor step_target = {};  // after begin()
    size_t first_copy = 0, copies = 0;
  };
  void plan_state(Parameter& parameter, size_t position, const StateValue& entry);
  void copy_sources_of_other_states();

  optim::Optimizer* optimizer_ = nullptr;
  std::vector<optim::Hyperparameters> groups_;
  std::vector<std::vector<std::string>> state_names_;  // of each group, once these are set
  std::vector<Parameter> parameters_;
  std::vector<Copy> copies_;
};

// As load_optimizer_state_dict, with its errors.
OptimizerLoad plan_optimizer_load(optim::Optimizer& optimizer, const StateDict& state_dict);

}  // namespace tessera::detail
