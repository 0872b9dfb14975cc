// Matrix products for generation: what a row of x gives does not depend on the rows beside it, bit for bit.
//
//   const RowWeight weight = RowWeight::of(linear.weight, RowDtype::kInt8);
//   at::Tensor y = row_product(x, weight, bias);                // x [N, in] fp32: y [N, out] fp32
//   const auto qkv = row_products(x, {&q, &k, &v});
//
// A library's product rounds otherwise for other numbers of rows; here a result is one sum over `in` in a fixed order,
// computed in float32. Weights of few rows are read at the speed of memory. The vector instructions are those of the
// processor (detail/row_kernels.h): another processor may round otherwise. Plain tensors on a CPU, no derivative.
// Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <string_view>
#include <vector>

namespace tessera::kernels {

// How a weight lies in memory. bfloat16 and float16 take two bytes an element and are widened as they are read. int8:
// each row in 255 steps of its own largest value. int4: 32 elements of a row in 16 steps between the least and the
// largest of them, which are GGUF's blocks Q4_1 (5 bits an element); what such a file held keeps its values.
enum class RowDtype { kFloat32, kBFloat16, kFloat16, kInt8, kInt4 };

class RowWeight {
 public:
  RowWeight() = default;
  // Of [out, in], any floating dtype. Shares its memory where dtype and layout are as wanted. As int4, rows that are no
  // whole blocks lie as int8. Error kFormat for a weight that int4 cannot hold: no finite number, or beyond fp16.
  static RowWeight of(const at::Tensor& weight, RowDtype dtype);
  bool defined() const { return values_.defined(); }
  RowDtype dtype() const { return dtype_; }
  int64_t out() const { return values_.size(0); }
  int64_t in() const { return in_; }
  const at::Tensor& values() const { return values_; }  // of int4: bytes [out, in / 32 * 20]
  const at::Tensor& scales() const { return scales_; }  // fp32 [out] of int8; else undefined
  at::Tensor widened() const;                           // what it stands for, fp32 [out, in]

 private:
  RowDtype dtype_ = RowDtype::kFloat32;
  int64_t in_ = 0;
  at::Tensor values_, scales_;
};

// x [..., in] fp32, biases [out] fp32 or undefined. Error kShape for anything else.
at::Tensor row_product(const at::Tensor& x, const RowWeight& weight, const at::Tensor& bias = {});
// Several at once of the same x; biases: none, or one each.
std::vector<at::Tensor> row_products(const at::Tensor& x, std::span<const RowWeight* const> weights,
                                     std::span<const at::Tensor> biases = {});

// activation(gate) * up, row by row: silu, or gelu in its tanh form. Two fp32 tensors of one shape.
at::Tensor row_gate(const at::Tensor& gate, const at::Tensor& up, bool gelu);

// The vector instructions in use: "avx512", "avx2" or "plain".
std::string_view row_kernels_name();

}  // namespace tessera::kernels
