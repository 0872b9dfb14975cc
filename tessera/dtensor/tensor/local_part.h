// This rank's part of a tensor, be it distributed or plain.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

// to_local of a DTensor; a plain tensor as it is. No communication.
inline at::Tensor local_part(const at::Tensor& tensor) { return is_dtensor(tensor) ? to_local(tensor) : tensor; }

}  // namespace tessera
