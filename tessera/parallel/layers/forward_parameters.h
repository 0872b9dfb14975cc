// The tensors that a module's forward reads as parameters, and their replacement by leaves of another graph. Activation
// checkpoints and CUDA graphs use this to compute gradients in a graph of their own.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera {

// Registers a tensor member that a module's forward reads and that is no registered parameter: a view of a flat
// parameter (FSDP1 without use_orig_params). There is one list per process. Thread-safe.
void add_unregistered_member(const nn::Module& module, at::Tensor* member);
void remove_unregistered_member(const nn::Module& module, at::Tensor* member);

// The distinct parameters, and for each of them all module members that hold it.
struct ForwardParameters {
  std::vector<at::Tensor> tensors;
  std::vector<std::vector<at::Tensor*>> members;
  void add_own(nn::Module& module);  // adds the parameters of this module, without those of its children
};
// The parameters that the members hold now: unsharded ones inside the hooks of sharding, else shards.
ForwardParameters forward_parameters(nn::Module& module);

// While this object lives, the members hold `leaves`, one for each parameter.
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

// The same values as leaves of a new graph, which require a gradient where the given tensors do. Undefined tensors stay
// undefined.
std::vector<at::Tensor> as_leaves(const std::vector<at::Tensor>& tensors);

}  // namespace tessera
