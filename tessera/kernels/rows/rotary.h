// Rotary position embedding in the half-rotation layout of transformers: element i is paired with element i + d/2.
//
//   auto q = rotary(q, cos, sin);     // q [B, T, H, d]; cos and sin fp32 [B, T, d/2] or [1, T, d/2]
//
// Saves only cos and sin for the backward, which rotates by the opposite angle. Computes in fp32 and rounds once.
// DTensors: batch, tokens and heads may be sharded (operation tessera::rotary). Plain cos and sin with a DTensor x are
// the angles of all its tokens, the same on all ranks. models/config/rope.h computes the angles. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

}  // namespace tessera::kernels
