// Tensors that may be distributed or plain.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

// to_local of a DTensor; a plain tensor as it is. No communication.
inline at::Tensor local_part(const at::Tensor& tensor) { return is_dtensor(tensor) ? to_local(tensor) : tensor; }

// A plain tensor that all ranks have alike, as operations take it beside `other`: of a DTensor replicated on its mesh,
// else as it is. No communication.
inline at::Tensor replicated_beside(const at::Tensor& tensor, const at::Tensor& other) {
  if (is_dtensor(tensor) || !is_dtensor(other)) return tensor;
  return from_local(tensor, device_mesh(other), Placements(placements(other).size(), Replicate()));
}

}  // namespace tessera
