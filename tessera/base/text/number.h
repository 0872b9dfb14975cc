// A number that a whole text is.
//
//   parse_number<int64_t>("-17")     // -17
//   parse_number<double>("1e-3 ")    // nothing: a space is behind it
//
// In C's notation whatever the locale, without a plus. Nothing for a number that the type does not hold; texts like
// "inf" and "nan" are numbers of floating types. Pure, thread-safe.
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
