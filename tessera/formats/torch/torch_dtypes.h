// The names that torch.save uses for dtypes ("float32") and for their storage classes ("FloatStorage").
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string_view>

namespace tessera {

// The name after "torch.". Error kFormat for a dtype that cannot be saved (quantised dtypes, bits).
std::string_view torch_dtype_name(c10::ScalarType dtype);
std::optional<c10::ScalarType> find_torch_dtype(std::string_view name);

// The storage class, e.g. "FloatStorage"; empty for a dtype that is saved as an UntypedStorage (float8, uint16, ...).
std::string_view torch_storage_name(c10::ScalarType dtype);
std::optional<c10::ScalarType> find_torch_storage(std::string_view name);

}  // namespace tessera
