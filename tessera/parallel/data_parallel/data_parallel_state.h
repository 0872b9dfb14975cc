// What fully_shard and replicate have in common as attachments of a module.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/nn/module.h"

namespace tessera {

class DataParallelState : public nn::Module::Attachment {
 public:
  virtual bool synchronizes() const = 0;
  virtual void set_synchronize(bool on) = 0;
  virtual void set_divide(double factor) = 0;
};

// The states of this kind at the module and all below it, outermost first.
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

// Those, or without `recurse` that of the module alone. Error kShape where there is none, named [where]: `kind` is
// what a module with such a state is, `verb` what makes it that.
template <class State>
std::vector<State*> wanted_states(nn::Module& module, bool recurse, const std::string& where, const char* kind,
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

void cast_floating(const nn::TensorRefs& tensors, c10::ScalarType dtype);

// For gradients in float16: what they are divided by before they are summed, so that neither the sum nor the quotient
// leaves the range (FSDP2's rule: the largest power of two below about the square root of the divisor).
double fp16_pre_divisor(double divide);

}  // namespace tessera
