// Loads a value of a state dict in place into a tensor of the model or of the optimizer. No communication.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace tessera::detail {

// Returns this rank's local shard of `whole` for the placements and the mesh of the DTensor `like`. The result is on
// the device of `whole`. It is a view of `whole` when the shard is one rectangular block.
at::Tensor local_shard_of(const at::Tensor& whole, const at::Tensor& like);

// Returns why load_tensor cannot load `value` into `target`, or an empty text when it can. `value` may be a meta tensor
// whose values are received later.
std::string load_mismatch(const at::Tensor& target, const at::Tensor& value);

// Copies `value` into `target` and converts dtype and device. For a DTensor target, `value` is a DTensor with the same
// placements and mesh, or a plain tensor with the whole values. The copy is one in-place write of the target for
// autograd's version counter.
void load_tensor(const at::Tensor& target, const at::Tensor& value);

}  // namespace tessera::detail
