// Helpers for tensors that may be DTensors or plain tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

// Returns the local tensor of a DTensor, and a plain tensor unchanged. No communication.
inline at::Tensor local_tensor_of(const at::Tensor& tensor) { return is_dtensor(tensor) ? to_local(tensor) : tensor; }

// Converts a tensor for an operation with `other`. If `tensor` is plain and `other` is a DTensor, returns `tensor` as a
// replicated DTensor on the mesh of `other`; the values must be equal on all ranks. Otherwise returns `tensor`
// unchanged. No communication.
inline at::Tensor replicate_like(const at::Tensor& tensor, const at::Tensor& other) {
  if (is_dtensor(tensor) || !is_dtensor(other)) return tensor;
  return from_local(tensor, device_mesh(other), Placements(placements(other).size(), Replicate()));
}

}  // namespace tessera
