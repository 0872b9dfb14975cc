// The gates of gated MLPs: an activation of one projection, times the other.
//
//   at::Tensor y = swiglu(gate, up);     // silu(gate) * up: Llama, Qwen
//   at::Tensor y = geglu(gate, up);      // gelu(gate) * up, gelu in its tanh form: Gemma
//
// Both take tensors of equal shape and dtype, keep gate and up for the backward and nothing else, and have no second
// derivative. DTensors: any dim may be sharded (tessera::swiglu, tessera::swiglu_backward, tessera::geglu,
// tessera::geglu_backward). Error kShape for tensors that are not alike. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);
at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace tessera::kernels
