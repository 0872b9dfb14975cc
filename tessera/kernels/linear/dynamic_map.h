// The map of 8-bit dynamic quantisation (https://arxiv.org/abs/1511.04561, as bitsandbytes' create_dynamic_map and
// torchao have it): a bit for the sign, a run of zeros for the exponent, the rest for the fraction.
//
//   const at::Tensor map = kernels::dynamic_map(/*is_signed=*/true);
//   map[codes] * scale                                               // what codes mean
//
// No communication.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera::kernels {

// 256 rising values in [-1, 1], or [0, 1], float32.
at::Tensor dynamic_map(bool is_signed);
// The index of the nearest of the 256 values of a map; of two equally near ones the upper.
uint8_t nearest_in_map(const float* map, float value);

}  // namespace tessera::kernels
