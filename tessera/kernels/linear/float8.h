// Tensors in float8 with one scale each, and their matrix products: native where the device has them, else in float32.
//
//   const auto a = kernels::to_float8(x, at::kFloat8_e4m3fn), b = kernels::to_float8(weight, at::kFloat8_e4m3fn);
//   at::Tensor y = kernels::float8_product(a, b, at::kBFloat16);          // x weight^T
//
// Plain tensors, no derivative. Thread-safe; no communication.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

// A float8 tensor and its scale: data = round(tensor * scale). The scale maps the tensor's largest absolute value to
// the dtype's largest number.
struct Float8Tensor {
  at::Tensor data;           // float8, of the tensor's shape
  at::Tensor scale;          // float32 scalar
  at::Tensor value() const;  // float32: data / scale
  Float8Tensor t() const { return {data.t(), scale}; }
};
// Quantizes a tensor like torchao's hp_tensor_to_float8_dynamic with one scale per tensor. dtype: float8_e4m3fn or
// float8_e5m2. The rounding is that of torch's conversion.
Float8Tensor to_float8(const at::Tensor& tensor, c10::ScalarType dtype);

// Returns whether the device multiplies float8 natively (_scaled_mm: CUDA from compute capability 8.9). The first call
// per device runs such a product to find out.
bool has_float8_products(c10::Device device);
// The product of a [M, K] and the transpose of b [N, K], as [M, N] in `dtype`, with float32 sums. At most one of a and
// b may be float8_e5m2.
at::Tensor float8_product(const Float8Tensor& a, const Float8Tensor& b, c10::ScalarType dtype);

}  // namespace tessera::kernels
