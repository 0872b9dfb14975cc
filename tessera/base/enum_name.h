// The name of an enumerator, out of the names of all of them in the order of their declaration.
//
//   const char* to_string(Container container) { return enum_name(container, {"text", "JSON lines", "Parquet"}); }
#pragma once

#include <cstddef>

namespace tessera {

// unknown: of a value that is no enumerator. The enumerators count from 0 without a gap.
template <class Enum, size_t count>
constexpr const char* enum_name(Enum value, const char* const (&names)[count], const char* unknown = "?") noexcept {
  const auto place = static_cast<size_t>(value);
  return place < count ? names[place] : unknown;
}

}  // namespace tessera
