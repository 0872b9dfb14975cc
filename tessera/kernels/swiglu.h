// The gate of Llama's MLP: silu(gate) * up.
//
//   at::Tensor y = swiglu(gate, up);     // tensors of equal shape and dtype
//
// Keeps gate and up for the backward and nothing else; has no second derivative. DTensors: any dim may be sharded
// (tessera::swiglu, tessera::swiglu_backward). Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera {

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace tessera
