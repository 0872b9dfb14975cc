// Rotary position embedding in the half-rotation layout of transformers: the pairs are (i, i + d/2).
//
//   auto q = rotary(q, cos, sin);     // q [B, T, H, d]; cos and sin fp32 [B, T, d/2] or [1, T, d/2]
//
// Keeps only cos and sin for the backward, which is the rotation by the opposite angle. Computes in fp32 and rounds
// once. DTensors: rows, tokens and heads may be sharded (tessera::rotary); plain cos and sin beside a DTensor are those
// of all its tokens, alike on all ranks. Thread-safe. See models/config/rope.h for the angles.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

}  // namespace tessera::kernels
