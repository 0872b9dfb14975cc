// Tensors whose bytes a Python script can also make, and sinks that store all bytes that they receive.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "tessera/formats/torch/zip_writer.h"

namespace tessera::testing {

inline constexpr at::ScalarType kSavedDtypes[] = {at::kDouble,
                                                  at::kFloat,
                                                  at::kHalf,
                                                  at::kBFloat16,
                                                  at::kLong,
                                                  at::kInt,
                                                  at::kShort,
                                                  at::kChar,
                                                  at::kByte,
                                                  at::kBool,
                                                  at::kComplexDouble,
                                                  at::kComplexFloat,
                                                  at::kComplexHalf,
                                                  at::kUInt16,
                                                  at::kUInt32,
                                                  at::kUInt64,
                                                  at::kFloat8_e4m3fn,
                                                  at::kFloat8_e5m2,
                                                  at::kFloat8_e4m3fnuz,
                                                  at::kFloat8_e5m2fnuz,
                                                  at::kFloat8_e8m0fnu,
                                                  at::ScalarType::Float4_e2m1fn_x2};

// Byte i is (37 i + seed) % 251, or % 2 for bool. pattern() in oracle/torch_oracle.py makes the same bytes.
inline at::Tensor pattern(at::ScalarType dtype, at::IntArrayRef shape, int64_t seed) {
  auto tensor = at::empty(shape, dtype);
  auto* bytes = static_cast<unsigned char*>(tensor.mutable_data_ptr());
  const int64_t modulus = dtype == at::kBool ? 2 : 251;
  for (size_t i = 0; i < tensor.nbytes(); ++i) {
    bytes[i] = static_cast<unsigned char>((37 * static_cast<int64_t>(i) + seed) % modulus);
  }
  return tensor;
}

// True if dtype, shape and bytes in row-major order are equal. Works for dtypes without a comparison, too.
inline bool same_tensor(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  const auto left = a.contiguous(), right = b.contiguous();
  return left.nbytes() == 0 || std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0;
}

struct StringSink {
  std::string bytes;
  size_t largest_piece = 0;
  ByteSink sink() {
    return [this](std::span<const std::byte> piece) {
      bytes.append(reinterpret_cast<const char*>(piece.data()), piece.size());
      largest_piece = std::max(largest_piece, piece.size());
    };
  }
};

inline std::span<const std::byte> bytes_of_text(const std::string& text) { return std::as_bytes(std::span(text)); }

}  // namespace tessera::testing
