// The value table of 8-bit dynamic quantization (https://arxiv.org/abs/1511.04561, bitsandbytes' create_dynamic_map,
// torchao): a code has a sign bit, a run of zeros for the exponent, and the remaining bits for the fraction.
//
//   const at::Tensor map = kernels::dynamic_map(/*is_signed=*/true);
//   map[codes] * scale                                               // decodes uint8 codes
//
// No communication.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera::kernels {

// 256 ascending values, float32, in [-1, 1] where is_signed is true, else in [0, 1].
at::Tensor dynamic_map(bool is_signed);
// Returns the index of the value in the map that is nearest to `value`; of two equally near values, the larger index.
uint8_t nearest_in_map(const float* map, float value);

}  // namespace tessera::kernels
