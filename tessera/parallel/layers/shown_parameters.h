// The parameters that a module's forward reads, and leaves of another graph in their place: for who runs a forward
// whose gradients are to go another way than where it was called.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera {

// Members that a module's forward reads and that are not registered as parameters, because they are views of a flat
// parameter (FSDP1 without use_orig_params). One list for the process, safe to use from several threads.
void add_unregistered_member(const nn::Module& module, at::Tensor* member);
void remove_unregistered_member(const nn::Module& module, at::Tensor* member);

// Each once, with all members of modules that show it.
struct ShownParameters {
  std::vector<at::Tensor> tensors;
  std::vector<std::vector<at::Tensor*>> members;
  void add_own(nn::Module& module);  // those that are no child's
};
// As they are shown now: whole ones inside the hooks of sharding.
ShownParameters shown_parameters(nn::Module& module);

// While it lives, the members show these, one for each parameter.
class ShowLeaves {
 public:
  ShowLeaves(const ShownParameters& shown, const std::vector<at::Tensor>& leaves);
  ~ShowLeaves();
  ShowLeaves(const ShowLeaves&) = delete;
  ShowLeaves& operator=(const ShowLeaves&) = delete;

 private:
  std::vector<std::pair<at::Tensor*, at::Tensor>> before_;
};

// Those of both, in this order, that require a gradient.
std::vector<at::Tensor> that_require_grad(const std::vector<at::Tensor>& first, const std::vector<at::Tensor>& second);

// The same values as leaves, which require a gradient where the tensors do. Undefined ones stay so.
std::vector<at::Tensor> leaves_of(const std::vector<at::Tensor>& tensors);

}  // namespace tessera
