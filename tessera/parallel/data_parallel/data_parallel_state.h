// The state that fully_shard, replicate or wrap_fsdp1 attaches to a module.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/nn/module.h"

namespace tessera {

class DataParallelState : public nn::Module::ModuleState {
 public:
  // Whether the next backward reduces gradients.
  virtual bool synchronizes() const = 0;
  virtual void set_synchronize(bool on) = 0;
  // Sets the number by which gradients are divided after they are summed over ranks.
  virtual void set_gradient_divisor(double factor) = 0;
};

// The states of type State at the module and all modules below it, outermost first.
template <class State>
std::vector<State*> states_below(nn::Module& module) {
  std::vector<State*> out;
  module.for_each_module([&](nn::Module& each) {
    if (auto* state = dynamic_cast<State*>(each.sharding().get())) out.push_back(state);
  });
  return out;
}
inline std::vector<DataParallelState*> data_parallel_states(nn::Module& module) {
  return states_below<DataParallelState>(module);
}

// Returns states_below<State>(module), or without `recurse` only the state of `module` itself. Error kShape if there is
// no such state. For the message, `where` names the operation, `kind` describes a module that has the state
// ("sharded"), and `verb` names the function that attaches the state.
template <class State>
std::vector<State*> require_states(nn::Module& module, bool recurse, const std::string& where, const char* kind,
                                   const char* verb) {
  auto states = states_below<State>(module);
  TESSERA_CHECK(!states.empty(), ErrorKind::kShape, "[{}] no module here is {}. Call {} first.", where, kind, verb);
  if (recurse) return states;
  auto* own = dynamic_cast<State*>(module.sharding().get());
  TESSERA_CHECK(own != nullptr, ErrorKind::kShape,
                "[{}] this module is not {} itself. Pass recurse, or a module that {} was called on.", where, kind,
                verb);
  return {own};
}

// Casts the floating-point tensors to `dtype`.
void cast_floating(const nn::TensorRefs& tensors, c10::ScalarType dtype);

// The factor by which float16 gradients are divided before they are summed over ranks. The rest of `divide` is applied
// after the sum, so that values neither overflow nor underflow. FSDP2's rule: a power of two near the square root of
// `divide`.
double fp16_pre_divisor(double divide);

}  // namespace tessera
