// Weights that stay as they are, in about 4 bits an element: NF4 (QLoRA, https://arxiv.org/abs/2305.14314), or the
// blocks of a GGUF file as they lie there.
//
//   const auto weight = QuantizedWeight::nf4(values, {.double_quant = true});      // float32 [out, in]
//   at::Tensor y = quantized_linear(x, weight, bias);                              // as linear(x, weight.values())
//
// NF4: blocks of 64 elements of the flattened weight; each element is the nearest of 16 values, two to a byte, the
// first in the upper half, times the block's largest absolute value (float32). With double_quant these are kept in 8
// bits: their mean apart, the rest in blocks of 256 by kernels/linear/dynamic_map.h. As bitsandbytes' quantize_4bit.
//
// A packed weight is bytes: it has no elements that FSDP could cut, and lies whole on each rank that has the layer.
// part() is what a rank of tensor parallelism multiplies with. Packed on the CPU; to() brings it to any device, where
// operations of libtorch decode it to the same values. Thread-safe once made.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>

#include "tessera/formats/gguf/gguf_quants.h"

namespace tessera::kernels {

struct Nf4Options {
  bool double_quant = false;
};

class QuantizedWeight {
 public:
  QuantizedWeight() = default;  // none
  // values: floating [out, in], on the CPU. Error kShape.
  static QuantizedWeight nf4(const at::Tensor& values, const Nf4Options& options = {});
  // Of rows that are whole blocks: uint8 [out, bytes of a row]. Error kShape; kFormat for a type that is not decoded.
  static QuantizedWeight gguf(GgmlType type, at::Tensor rows, int64_t in);

  bool defined() const { return packed_.defined(); }
  int64_t out() const { return out_; }
  int64_t in() const { return in_; }
  c10::Device device() const { return packed_.device(); }
  int64_t size_bytes() const;  // of all that is kept
  // The same bytes on a device.
  QuantizedWeight to(c10::Device device) const;
  // Rows (dim 0) or columns (dim 1) [begin, begin + size), of the bytes that are here. Error kShape.
  QuantizedWeight part(int64_t dim, int64_t begin, int64_t size) const;
  // Rows [first, first + count) in float32, [count, in].
  at::Tensor rows(int64_t first, int64_t count) const;
  at::Tensor values() const { return rows(0, out_); }

  // Of NF4: two codes a byte [elements / 2, rounded up]; the largest of each block, float32 [blocks].
  const at::Tensor& packed() const { return packed_; }
  at::Tensor absmax() const;

 private:
  at::Tensor nf4_rows(int64_t first, int64_t count) const;
  at::Tensor gguf_rows(int64_t first, int64_t count) const;
  at::Tensor absmax_of(int64_t first_block, int64_t blocks) const;
  int64_t out_ = 0, in_ = 0;
  int64_t first_row_ = 0, first_column_ = 0, row_elements_ = 0;  // of this part in what is packed
  std::optional<GgmlType> type_{};                               // none: NF4
  at::Tensor packed_{};
  at::Tensor absmax_{};         // float32 [blocks], or uint8 codes of it
  at::Tensor nested_absmax_{};  // float32, of each 256 codes
  at::Tensor table_{}, map_{};  // what codes of NF4 and of its scales mean, beside them
  float mean_ = 0;
};

// The 16 values of NF4, rising: quantiles of a normal distribution, -1, 0 and 1 among them. From the table of the
// paper's appendix E, which bitsandbytes has as well (functional.py, get_4bit_type).
std::span<const float, 16> nf4_values();

// y [..., out] = x [..., in] weight^T + bias, in x's dtype. Forward and backward decode a few rows at a time, so that
// never all of the weight is in memory; nothing of it is kept between them. Differentiable in x and bias, twice too.
// Error kShape; kConfig for DTensors (nn/linear/quantized_linear.h takes them) and for x elsewhere than the weight. No
// communication.
at::Tensor quantized_linear(const at::Tensor& x, const QuantizedWeight& weight, const at::Tensor& bias = {});

}  // namespace tessera::kernels
