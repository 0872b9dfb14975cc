// The tensor types of GGUF, and their decoding from and encoding to blocks.
//
//   std::vector<float> row(n);
//   dequantize(GgmlType::kQ4_K, blocks, row);        // bitwise equal to the gguf Python package
//   quantize_q8_0(row, blocks);
//
// A row is a whole number of blocks: 32 or 256 elements with shared scales. All functions are pure and thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace tessera {

// Type numbers as stored in files. ggml_type_info() also has rows for types that are listed but cannot be decoded.
enum class GgmlType : uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kBF16 = 30,
};

struct GgmlTypeInfo {
  GgmlType type;
  std::string_view name;    // "Q4_K"
  uint32_t block_elements;  // 1 for plain types
  uint32_t block_bytes;
  bool decodes;  // dequantize() supports the type
};

// Returns the description of the type with number `type`; null if the number is unknown.
const GgmlTypeInfo* ggml_type_info(uint32_t type) noexcept;

// values.size() must be a multiple of block_elements, and blocks.size() the bytes of that number of blocks. Error
// kFormat for a type that cannot be decoded.
void dequantize(GgmlType type, std::span<const std::byte> blocks, std::span<float> values);

// Encodes blocks of 32 values as 34 bytes: an F16 scale, then 32 signed bytes. NaN is stored as 0.
void quantize_q8_0(std::span<const float> values, std::span<std::byte> blocks);

}  // namespace tessera
