// Matrix products for generation that are batch-invariant: the result of a row of x has the same bits whatever the
// other rows are and however many there are.
//
//   const InferenceWeight weight = InferenceWeight::of(linear.weight, WeightFormat::kInt8);
//   at::Tensor y = batch_invariant_linear(x, weight, bias);                // x [N, in] fp32: y [N, out] fp32
//   const auto qkv = batch_invariant_linears(x, {&q, &k, &v});
//
// A GEMM of a library may round differently for another number of rows. Here a result is one sum over `in` in a fixed
// order, in float32. With few rows of x a product takes as long as reading the weight from memory. The loops use the
// vector instructions of the processor (kernels/simd/gemv_kernels.h), so another processor may round differently. Plain
// tensors on a CPU, without a derivative. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <string_view>
#include <vector>

namespace tessera::kernels {

// Storage format of a weight. kBFloat16 and kFloat16 take two bytes per element, and the loops convert them to float32
// as they read. kInt8 stores a row as codes from -127 to 127 and one scale. kInt4 stores each block of 32 elements of a
// row as codes of 4 bits, which stand for 16 evenly spaced values from the smallest to the largest element: the GGUF
// block format Q4_1, 5 bits per element. A weight that was read from Q4_1 blocks keeps its values exactly.
enum class WeightFormat { kFloat32, kBFloat16, kFloat16, kInt8, kInt4 };

class InferenceWeight {
 public:
  InferenceWeight() = default;
  // Converts a weight [out, in] of any floating-point dtype. The result shares the weight's memory where dtype and
  // layout already fit. kInt4 becomes kInt8 if the length of a row is not a multiple of 32. Error kFormat for kInt4 and
  // a weight with a value that is not finite or exceeds the range of fp16.
  static InferenceWeight of(const at::Tensor& weight, WeightFormat dtype);
  bool defined() const { return values_.defined(); }
  WeightFormat dtype() const { return dtype_; }
  int64_t out() const { return values_.size(0); }
  int64_t in() const { return in_; }
  const at::Tensor& values() const { return values_; }  // kInt4: bytes [out, in / 32 * 20]
  const at::Tensor& scales() const { return scales_; }  // kInt8: fp32 [out]; else undefined
  at::Tensor dequantized() const;                       // the decoded weight, fp32 [out, in]

 private:
  WeightFormat dtype_ = WeightFormat::kFloat32;
  int64_t in_ = 0;
  at::Tensor values_, scales_;
};

// Returns x weight^T + bias, fp32 [..., out]. x [..., in] fp32; bias [out] fp32 or undefined. Error kShape for other
// tensors.
at::Tensor batch_invariant_linear(const at::Tensor& x, const InferenceWeight& weight, const at::Tensor& bias = {});
// Products of the same x with several weights. biases: empty, or one per weight.
std::vector<at::Tensor> batch_invariant_linears(const at::Tensor& x, std::span<const InferenceWeight* const> weights,
                                                std::span<const at::Tensor> biases = {});

// Returns activation(gate) * up. The activation is silu, or gelu (tanh form) where `gelu` is true. gate and up:
// contiguous fp32 tensors of the same shape on the CPU, else Error kShape.
at::Tensor batch_invariant_gate(const at::Tensor& gate, const at::Tensor& up, bool gelu);

// The vector instructions that the loops use: "avx512", "avx2" or "plain".
std::string_view vector_level_name();

}  // namespace tessera::kernels
