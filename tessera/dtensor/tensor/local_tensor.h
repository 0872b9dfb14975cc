// Helpers for tensors that may be DTensors or plain tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

// The local tensor of a DTensor; a plain tensor is returned unchanged. No communication.
inline at::Tensor local_tensor_of(const at::Tensor& tensor) { return is_dtensor(tensor) ? to_local(tensor) : tensor; }

// Makes a plain tensor with equal values on all ranks usable in an operation with `other`. Returns a replicated DTensor
// on the mesh of `other` if `other` is a DTensor, else the tensor itself. No communication.
inline at::Tensor replicate_like(const at::Tensor& tensor, const at::Tensor& other) {
  if (is_dtensor(tensor) || !is_dtensor(other)) return tensor;
  return from_local(tensor, device_mesh(other), Placements(placements(other).size(), Replicate()));
}

}  // namespace tessera
