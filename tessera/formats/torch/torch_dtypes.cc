#include "tessera/formats/torch/torch_dtypes.h"

#include <array>

#include "tessera/base/error.h"

namespace tessera {
namespace {

struct TorchDtype {
  c10::ScalarType dtype;
  std::string_view name;
  std::string_view storage;
};
constexpr std::array kTorchDtypes = {
    TorchDtype{c10::ScalarType::Double, "float64", "DoubleStorage"},
    TorchDtype{c10::ScalarType::Float, "float32", "FloatStorage"},
    TorchDtype{c10::ScalarType::Half, "float16", "HalfStorage"},
    TorchDtype{c10::ScalarType::BFloat16, "bfloat16", "BFloat16Storage"},
    TorchDtype{c10::ScalarType::Long, "int64", "LongStorage"},
    TorchDtype{c10::ScalarType::Int, "int32", "IntStorage"},
    TorchDtype{c10::ScalarType::Short, "int16", "ShortStorage"},
    TorchDtype{c10::ScalarType::Char, "int8", "CharStorage"},
    TorchDtype{c10::ScalarType::Byte, "uint8", "ByteStorage"},
    TorchDtype{c10::ScalarType::Bool, "bool", "BoolStorage"},
    TorchDtype{c10::ScalarType::ComplexDouble, "complex128", "ComplexDoubleStorage"},
    TorchDtype{c10::ScalarType::ComplexFloat, "complex64", "ComplexFloatStorage"},
    TorchDtype{c10::ScalarType::ComplexHalf, "complex32", ""},
    TorchDtype{c10::ScalarType::UInt16, "uint16", ""},
    TorchDtype{c10::ScalarType::UInt32, "uint32", ""},
    TorchDtype{c10::ScalarType::UInt64, "uint64", ""},
    TorchDtype{c10::ScalarType::Float8_e4m3fn, "float8_e4m3fn", ""},
    TorchDtype{c10::ScalarType::Float8_e5m2, "float8_e5m2", ""},
    TorchDtype{c10::ScalarType::Float8_e4m3fnuz, "float8_e4m3fnuz", ""},
    TorchDtype{c10::ScalarType::Float8_e5m2fnuz, "float8_e5m2fnuz", ""},
    TorchDtype{c10::ScalarType::Float8_e8m0fnu, "float8_e8m0fnu", ""},
    TorchDtype{c10::ScalarType::Float4_e2m1fn_x2, "float4_e2m1fn_x2", ""},
};

const TorchDtype& saved_dtype(c10::ScalarType dtype) {
  for (const auto& known : kTorchDtypes) {
    if (known.dtype == dtype) return known;
  }
  raise(ErrorKind::kFormat, "[torch_save] dtype {} cannot be saved. Convert the tensor first.", c10::toString(dtype));
}

}  // namespace

std::string_view torch_dtype_name(c10::ScalarType dtype) { return saved_dtype(dtype).name; }
std::string_view torch_storage_name(c10::ScalarType dtype) { return saved_dtype(dtype).storage; }

std::optional<c10::ScalarType> find_torch_dtype(std::string_view name) {
  for (const auto& known : kTorchDtypes) {
    if (known.name == name) return known.dtype;
  }
  return std::nullopt;
}

std::optional<c10::ScalarType> find_torch_storage(std::string_view name) {
  for (const auto& known : kTorchDtypes) {
    if (!known.storage.empty() && known.storage == name) return known.dtype;
  }
  return std::nullopt;
}

}  // namespace tessera
