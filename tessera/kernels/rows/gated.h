// Gated activations of MLPs: activation(gate) * up.
//
//   at::Tensor y = swiglu(gate, up);     // silu(gate) * up: Llama, Qwen
//   at::Tensor y = geglu(gate, up);      // gelu(gate) * up, gelu in its tanh form: Gemma
//
// gate and up have the same shape and dtype, else Error kShape. Both functions save only gate and up for the
// backward. A double backward runs plain operations. DTensors: any dim may be sharded (operations tessera::swiglu,
// tessera::swiglu_backward, tessera::geglu, tessera::geglu_backward). Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);
at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace tessera::kernels
