// Tensors in float8 with one scale each, and their products: natively where the device has them, else from float32.
//
//   const auto a = kernels::to_float8(x, at::kFloat8_e4m3fn), b = kernels::to_float8(weight, at::kFloat8_e4m3fn);
//   at::Tensor y = kernels::float8_product(a, b, at::kBFloat16);          // x weight^T
//
// Plain tensors, no derivative. Thread-safe; no communication.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

// A tensor in float8 and what it was multiplied with: data = round(tensor * scale), whose largest is the dtype's.
struct Float8Tensor {
  at::Tensor data;           // of the tensor's shape
  at::Tensor scale;          // float32 scalar
  at::Tensor value() const;  // float32: data / scale
  Float8Tensor t() const { return {data.t(), scale}; }
};
// As torchao's hp_tensor_to_float8_dynamic with one scale; dtype float8_e4m3fn or float8_e5m2. Rounds as torch does.
Float8Tensor to_float8(const at::Tensor& tensor, c10::ScalarType dtype);

// Whether a device multiplies float8 itself (_scaled_mm: CUDA from compute capability 8.9 on). Tried once.
bool has_float8_products(c10::Device device);
// a [M, K] times b [N, K] transposed, in `dtype`, with sums in float32. At most one of the two is float8_e5m2.
at::Tensor float8_product(const Float8Tensor& a, const Float8Tensor& b, c10::ScalarType dtype);

}  // namespace tessera::kernels
