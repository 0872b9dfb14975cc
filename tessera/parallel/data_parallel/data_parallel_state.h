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
  // Divisor of the gradient sums.
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

// states_below, or without `recurse` the state of the module alone. Error kShape where there is none: `where` is the
// operation in the message, `kind` describes a module with such a state ("sharded"), `verb` is the function that
// attaches it.
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

// The factor by which float16 gradients are divided before the sum, so that neither the sum nor the quotient overflows
// or underflows. FSDP2's rule: the largest power of two below about the square root of the divisor.
double fp16_pre_divisor(double divide);

}  // namespace tessera
