// The name of an enumerator, from a list of all names in the order of their declaration.
//
//   const char* to_string(Container container) { return enum_name(container, {"text", "JSON lines", "Parquet"}); }
#pragma once

#include <cstddef>

namespace tessera {

// Returns `unknown` for a value that is not an enumerator. The enumerators must count from 0 without a gap.
template <class Enum, size_t count>
constexpr const char* enum_name(Enum value, const char* const (&names)[count], const char* unknown = "?") noexcept {
  const auto place = static_cast<size_t>(value);
  return place < count ? names[place] : unknown;
}

}  // namespace tessera
