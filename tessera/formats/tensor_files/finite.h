// Finds NaN and infinite values in tensors.
//
//   if (const auto found = find_non_finite(weight)) log_warning("{}", describe(*found));
//   check_finite(weight, "model.norm.weight", "[ckpt.verify] runs/a");                   // Error kFormat
//
// describe() gives e.g. "nan at [3, 5], 1 of 64 values". A CPU tensor is read once, in parallel, at the speed of
// memory. Integer and bool tensors are always finite. No communication. Thread-safe.
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
  std::string value;           // the first value: "nan", "inf", "-inf"; for a complex number both parts
  int64_t count = 0;           // values that are not finite
  int64_t total = 0;           // values of the tensor
};

// nullopt where all values are finite.
std::optional<NonFiniteValues> find_non_finite(const at::TensorBase& tensor);
std::string describe(const NonFiniteValues& values);

// Throws Error kFormat when `tensor` has a value that is NaN or infinite: "WHERE: tensor 'NAME' holds values that are
// not finite: nan at [3, 5], 1 of 64 values". If `tensor` is a box of a larger tensor, `offset` is the index at which
// the box begins, and the message gives the index in the larger tensor.
void check_finite(const at::TensorBase& tensor, std::string_view name, const std::string& where,
                  c10::IntArrayRef offset = {});

// Checks a tensor that was converted from `stored`, a tensor of the same shape. An infinity that `stored` does not have
// is a value beyond the range of the new dtype, and the error says so. Errors as in check_finite().
void check_converted(const at::TensorBase& stored, const at::TensorBase& converted, std::string_view name,
                     const std::string& where, c10::IntArrayRef offset = {});

// Whether all values of GGUF blocks are finite. Quantised values are finite when their block's scales are finite, so
// they are not decoded. Error kFormat for a type that cannot be decoded.
bool has_finite_values(GgmlType type, std::span<const std::byte> blocks);

}  // namespace tessera
