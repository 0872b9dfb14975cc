// The tensors that a module's forward reads as parameters, and their replacement by leaves of another graph. Activation
// checkpoints and CUDA graphs of layers use this to compute gradients in a separate autograd graph.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera {

// Adds to or removes from a list a tensor member that a module's forward reads like a parameter, but that is not a
// registered parameter: a view of a flat parameter (FSDP1 without use_orig_params). There is one list per process.
// Thread-safe.
void add_unregistered_member(const nn::Module& module, at::Tensor* member);
void remove_unregistered_member(const nn::Module& module, at::Tensor* member);

// tensors: the distinct parameters. members[i]: all module members that hold tensors[i].
struct ForwardParameters {
  std::vector<at::Tensor> tensors;
  std::vector<std::vector<at::Tensor*>> members;
  void add_own(nn::Module& module);  // adds the parameters of this module, without those of its children
};
// Returns the parameters that the members of `module` and of the modules below it hold now. Between the forward hooks
// of FSDP these are the unsharded parameters, otherwise the shards.
ForwardParameters forward_parameters(nn::Module& module);

// While this object lives, the modules' members hold `leaves` in place of the parameters: one leaf for each parameter.
class LeafParametersScope {
 public:
  LeafParametersScope(const ForwardParameters& parameters, const std::vector<at::Tensor>& leaves);
  ~LeafParametersScope();
  LeafParametersScope(const LeafParametersScope&) = delete;
  LeafParametersScope& operator=(const LeafParametersScope&) = delete;

 private:
  std::vector<std::pair<at::Tensor*, at::Tensor>> before_;  // each member, and the tensor that it held before
};

// The defined tensors that require a gradient, of `first` and then of `second`.
std::vector<at::Tensor> tensors_requiring_grad(const std::vector<at::Tensor>& first,
                                               const std::vector<at::Tensor>& second);

// Detaches the tensors, so that they are leaves of a new autograd graph. A leaf requires a gradient if the given tensor
// does. Undefined tensors stay undefined.
std::vector<at::Tensor> as_leaves(const std::vector<at::Tensor>& tensors);

}  // namespace tessera
