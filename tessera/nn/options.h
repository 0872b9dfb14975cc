// Dtype and device of a module's parameters.
//
//   Linear linear(8, 4, false, {.dtype = at::kBFloat16, .device = at::kMeta});   // allocates nothing
//
// Constructors leave parameters uninitialised; load_pretrained or init_weights fills them.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorOptions.h>

namespace tessera::nn {

struct ParameterOptions {
  c10::ScalarType dtype = c10::ScalarType::Float;
  c10::Device device = c10::Device(c10::DeviceType::CPU);

  c10::TensorOptions tensor_options() const { return c10::TensorOptions().dtype(dtype).device(device); }
};

}  // namespace tessera::nn
