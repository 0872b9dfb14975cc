// Frozen weights in about 4 bits per element: NF4 (QLoRA, https://arxiv.org/abs/2305.14314) or the unchanged blocks of
// a GGUF file.
//
//   const auto weight = QuantizedWeight::nf4(values, {.double_quant = true});      // float32 [out, in]
//   at::Tensor y = quantized_linear(x, weight, bias);                              // as linear(x, weight.values())
//
// NF4 splits the flattened weight into blocks of 64 elements with one scale each, the block's largest absolute value
// (float32). An element is the scale times one of 16 values, and is stored as the index of that value. A byte holds two
// indices, the first one in the upper four bits. With double_quant the scales take 8 bits each: their mean is
// subtracted, and blocks of 256 scales are encoded with kernels/linear/dynamic_map.h. The format is that of
// bitsandbytes' quantize_4bit.
//
// FSDP cannot shard a packed weight, because its bytes are not elements; each rank with the layer holds the whole
// weight. Tensor parallelism takes a rank's rows or columns with part(). Weights are packed on the CPU. to() copies
// the bytes to any device, where operations of libtorch decode them to the same values. Thread-safe after construction.
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
  QuantizedWeight() = default;  // undefined
  // Packs values, a floating-point tensor [out, in] on the CPU. Error kShape; kFormat for a value that is not finite.
  static QuantizedWeight nf4(const at::Tensor& values, const Nf4Options& options = {});
  // Takes the encoded rows of a GGUF tensor, uint8 [out, bytes of a row]; a row is a whole number of blocks. Error
  // kShape; kFormat for a type without a decoder.
  static QuantizedWeight gguf(GgmlType type, at::Tensor rows, int64_t in);

  bool defined() const { return packed_.defined(); }
  int64_t out() const { return out_; }
  int64_t in() const { return in_; }
  c10::Device device() const { return packed_.device(); }
  int64_t size_bytes() const;  // of indices and scales
  // Copies the packed bytes to a device.
  QuantizedWeight to(c10::Device device) const;
  // Returns rows (dim 0) or columns (dim 1) [begin, begin + size) as a view of the same bytes. Error kShape.
  QuantizedWeight part(int64_t dim, int64_t begin, int64_t size) const;
  // Decodes rows [first, first + count) to float32 [count, in].
  at::Tensor rows(int64_t first, int64_t count) const;
  at::Tensor values() const { return rows(0, out_); }

  // NF4 only. packed(): two indices per byte, [elements / 2, rounded up]. absmax(): the scale of each block, float32
  // [blocks].
  const at::Tensor& packed() const { return packed_; }
  at::Tensor absmax() const;

 private:
  at::Tensor nf4_rows(int64_t first, int64_t count) const;
  at::Tensor gguf_rows(int64_t first, int64_t count) const;
  at::Tensor absmax_of(int64_t first_block, int64_t blocks) const;
  int64_t out_ = 0, in_ = 0;
  int64_t first_row_ = 0, first_column_ = 0, row_elements_ = 0;  // where this part begins in packed_
  std::optional<GgmlType> type_{};                               // nullopt: NF4
  at::Tensor packed_{};
  at::Tensor absmax_{};         // float32 [blocks], or uint8 [blocks] with double_quant
  at::Tensor nested_absmax_{};  // float32, one per 256 values of absmax_
  at::Tensor table_{}, map_{};  // values of the NF4 indices and of the 8-bit scales, on the device of packed_
  float mean_ = 0;
};

// The 16 values of NF4 in ascending order: quantiles of a normal distribution, with -1, 0 and 1. Source: the table in
// appendix E of the QLoRA paper, which bitsandbytes uses, too (functional.py, get_4bit_type).
std::span<const float, 16> nf4_values();

// y [..., out] = x [..., in] weight^T + bias, in the dtype of x. Forward and backward decode a few rows at a time, so
// the whole decoded weight is never in memory. Nothing decoded is kept from forward to backward. First and second
// derivatives in x and bias. Error kShape; kConfig for DTensors (nn/linear/quantized_linear.h supports them) and for x
// on another device than the weight. No communication.
at::Tensor quantized_linear(const at::Tensor& x, const QuantizedWeight& weight, const at::Tensor& bias = {});

}  // namespace tessera::kernels
