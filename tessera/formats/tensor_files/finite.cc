#include "tessera/formats/tensor_files/finite.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/ranges.h>

#include <atomic>
#include <cmath>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/formats/torch/torch_dtypes.h"

namespace tessera {
namespace {

constexpr int64_t kBlock = 4096;             // values between two checks for an early end
constexpr int64_t kValuesPerTask = 1 << 16;  // values of one parallel task

// Whether all values are finite. A float is NaN or infinite when all bits of its exponent are set. The inner loop has
// no branch, so the compiler vectorises it.
template <class Bits>
bool all_exponents_fit(const Bits* values, int64_t count, Bits exponent) {
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t end = std::min(count, first + kBlock);
    Bits found = 0;
    for (int64_t i = first; i < end; ++i) found |= static_cast<Bits>((values[i] & exponent) == exponent);
    if (found != 0) return false;
  }
  return true;
}

template <class Bits>
bool all_exponents_fit_in(const at::Tensor& tensor, Bits exponent) {
  const auto* values = static_cast<const Bits*>(tensor.const_data_ptr());
  std::atomic<bool> fit = true;
  at::parallel_for(0, tensor.numel(), kValuesPerTask, [&](int64_t begin, int64_t end) {
    if (fit && !all_exponents_fit(values + begin, end - begin, exponent)) fit = false;
  });
  return fit;
}

bool all_finite(const at::Tensor& tensor) {
  if (tensor.is_complex()) return all_finite(at::view_as_real(tensor.resolve_conj()));
  if (!tensor.is_floating_point() || tensor.numel() == 0) return true;
  // isfinite() does not support float8. Conversion to float32 keeps NaN and infinity.
  if (tensor.element_size() == 1) return all_finite(tensor.to(at::kFloat));
  if (!tensor.is_cpu() || !tensor.is_non_overlapping_and_dense()) return tensor.isfinite().all().item<bool>();
  switch (tensor.scalar_type()) {
    case at::kBFloat16:
      return all_exponents_fit_in<uint16_t>(tensor, 0x7F80);
    case at::kHalf:
      return all_exponents_fit_in<uint16_t>(tensor, 0x7C00);
    case at::kFloat:
      return all_exponents_fit_in<uint32_t>(tensor, 0x7F80'0000);
    case at::kDouble:
      return all_exponents_fit_in<uint64_t>(tensor, 0x7FF0'0000'0000'0000);
    default:
      return tensor.isfinite().all().item<bool>();
  }
}

std::string format_value(double value) { return std::isnan(value) ? "nan" : fmt::format("{}", value); }

std::string format_value(const at::Tensor& value) {
  if (!value.is_complex()) return format_value(value.item<double>());
  const auto number = value.item<c10::complex<double>>();
  return fmt::format("({}, {})", format_value(number.real()), format_value(number.imag()));
}

// Converts `place`, the position of an element when the tensor is flattened in row-major order, to the element's index:
// one number for each dim.
std::vector<int64_t> index_of(int64_t place, c10::IntArrayRef sizes) {
  std::vector<int64_t> index(sizes.size());
  for (size_t dim = sizes.size(); dim-- > 0; place /= sizes[dim]) index[dim] = place % sizes[dim];
  return index;
}

std::vector<int64_t> add_offset(std::vector<int64_t> index, c10::IntArrayRef offset) {
  for (size_t dim = 0; dim < offset.size(); ++dim) index[dim] += offset[dim];
  return index;
}

}  // namespace

std::optional<NonFiniteValues> find_non_finite(const at::TensorBase& tensor_base) {
  const at::NoGradGuard no_grad;
  const auto tensor = at::Tensor(tensor_base).detach();
  if (all_finite(tensor)) return std::nullopt;
  const auto flat = tensor.element_size() == 1 ? tensor.flatten().to(at::kFloat) : tensor.flatten();
  const auto places = flat.isfinite().logical_not_().nonzero();
  const int64_t first = places[0].item<int64_t>();
  return NonFiniteValues{.first = index_of(first, tensor.sizes()),
                         .value = format_value(flat[first]),
                         .count = places.size(0),
                         .total = tensor.numel()};
}

std::string describe(const NonFiniteValues& values) {
  return fmt::format("{} at [{}], {} of {} values", values.value, fmt::join(values.first, ", "), values.count,
                     values.total);
}

void check_finite(const at::TensorBase& tensor, std::string_view name, const std::string& where,
                  c10::IntArrayRef offset) {
  if (auto found = find_non_finite(tensor)) {
    found->first = add_offset(found->first, offset);
    raise(ErrorKind::kFormat, "{}: tensor {} holds values that are not finite: {}", where, quote(name),
          describe(*found));
  }
}

// `stored` is checked first, so an infinity that it had before the conversion is not reported as an overflow of the
// conversion.
void check_converted(const at::TensorBase& stored, const at::TensorBase& converted, std::string_view name,
                     const std::string& where, c10::IntArrayRef offset) {
  const auto found = find_non_finite(converted);
  if (!found) return;
  check_finite(stored, name, where, offset);
  auto value = at::Tensor(stored).detach();
  for (const int64_t index : found->first) value = value[index];
  raise(ErrorKind::kFormat,
        "{}: tensor {} holds {} at [{}], beyond the range of {} ({} of {} values). Take bfloat16 or float32.", where,
        quote(name), value.item<double>(), fmt::join(add_offset(found->first, offset), ", "),
        torch_dtype_name(converted.scalar_type()), found->count, found->total);
}

bool has_finite_values(GgmlType type, std::span<const std::byte> blocks) {
  constexpr uint16_t kHalfExponent = 0x7C00, kFloatExponent = 0x7F80;  // float16; bfloat16, and float32's upper half
  const auto* info = ggml_type_info(static_cast<uint32_t>(type));
  TESSERA_CHECK(info && info->decodes, ErrorKind::kFormat, "[gguf] tensor type {} cannot be decoded",
                info ? info->name : std::string_view("unknown"));
  // A quantised value is a scale times a small integer plus a minimum, so it is finite unless a scale is NaN or
  // infinite. For quantised types only the scales are read; for plain types (F32, F16, BF16) the values are read.
  size_t first = 0, second = 0;  // byte positions of the block's scale and of its minimum
  uint16_t exponent = kHalfExponent;
  switch (type) {
    case GgmlType::kF32:
      first = second = 2;
      exponent = kFloatExponent;
      break;
    case GgmlType::kBF16:
      exponent = kFloatExponent;
      break;
    case GgmlType::kQ4_1:
    case GgmlType::kQ5_1:
    case GgmlType::kQ4_K:
    case GgmlType::kQ5_K:
      second = 2;
      break;
    case GgmlType::kQ6_K:
      first = second = 208;
      break;
    default:
      break;
  }
  bool finite = true;
  for (size_t at = 0; at + info->block_bytes <= blocks.size(); at += info->block_bytes) {
    const auto fits = [&](size_t place) {
      uint16_t bits = 0;
      std::memcpy(&bits, blocks.data() + at + place, sizeof bits);
      return (bits & exponent) != exponent;
    };
    finite = finite && fits(first) && fits(second);
  }
  return finite;
}

}  // namespace tessera
