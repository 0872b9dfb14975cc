// Parses a text that is exactly one number.
//
//   parse_number<int64_t>("-17")     // -17
//   parse_number<double>("1e-3 ")    // nullopt: a space follows
//
// Uses C's notation in any locale, without a plus sign. nullopt for a number out of the type's range. "inf" and "nan"
// are numbers of floating types. Pure, thread-safe.
#pragma once

#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

namespace tessera {

template <class Number>
std::optional<Number> parse_number(std::string_view text) {
  Number value{};
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, value);
  if (error != std::errc() || end != last) return std::nullopt;
  return value;
}

}  // namespace tessera
