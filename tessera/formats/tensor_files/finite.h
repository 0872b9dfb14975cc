// Values of a tensor that are NaN or infinite.
//
//   if (const auto found = find_non_finite(weight)) log_warning("{}", describe(*found));     // "nan at [3, 5], 1 of 64
//   values" check_finite(weight, "model.norm.weight", "[ckpt.verify] runs/a");                       // Error kFormat
//
// A tensor on the CPU is read once, in parallel, at the speed of memory. Dtypes without such values (integers, bool)
// are finite. No communication. Thread-safe.
#pragma once

#include <ATen/core/TensorBase.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/formats/gguf/gguf_quants.h"

namespace tessera {

struct NonFiniteValues {
  std::vector<int64_t> first;  // index of the first value, in row-major order
  std::string value;           // the first value: "nan", "inf", "-inf"; of a complex number both parts
  int64_t count = 0;           // values that are not finite
  int64_t total = 0;           // values of the tensor
};

// Nothing where all values are finite.
std::optional<NonFiniteValues> find_non_finite(const at::TensorBase& tensor);
std::string describe(const NonFiniteValues& values);

// Error kFormat "WHERE: tensor 'NAME' holds values that are not finite: nan at [3, 5], 1 of 64 values". offset: where a
// part of a tensor begins in the whole, so that the index is of the whole.
void check_finite(const at::TensorBase& tensor, std::string_view name, const std::string& where,
                  c10::IntArrayRef offset = {});

// For a tensor that was converted from `stored` of the same shape: an infinity that `stored` lacks is a value beyond
// the range of the dtype, which the error says. Errors as check_finite's.
void check_converted(const at::TensorBase& stored, const at::TensorBase& converted, std::string_view name,
                     const std::string& where, c10::IntArrayRef offset = {});

// Whether all values of GGUF blocks are finite, which their scales decide; the others are not decoded. Error kFormat
// for a type that cannot be decoded.
bool has_finite_values(GgmlType type, std::span<const std::byte> blocks);

}  // namespace tessera
