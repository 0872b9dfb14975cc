// JSON numbers beyond 64 bits or beyond the range of a double, with the digits of the text.
//
//   const Json call = parse_json(text, "tool call", {.exact_numbers = true});
//   if (const auto digits = exact_digits(call["n"])) print(*digits);      // "12345678901234567890123", "1e400"
//   const std::string again = dump_json(call);                           // the same digits
//
// Python's json keeps integers of any length, so chat templates, clients and training records expect all digits. Such a
// value is not a number for nlohmann's own functions (is_number, get, dump): it is stored as a binary value, which
// parsed JSON never contains otherwise. Thread-safe.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/text/json.h"

namespace tessera {

// exact_digits() returns the digits of a number that is stored as a binary value (above), as a view into the value;
// nullopt for all other values. exact_number() makes such a number from its digits.
std::optional<std::string_view> exact_digits(const Json& value);
Json exact_number(std::string_view digits);
// Whether the digits are an integer: no decimal point and no exponent.
bool is_integer_text(std::string_view digits);
// The nearest double; infinite if the number is beyond the range.
double nearest_double(std::string_view digits);

// The JSON text of a value without white space; bytes that are not UTF-8 become U+FFFD.
std::string dump_json(const Json& value);

// A text in which each number that overflows a double is replaced by a finite number of the same length.
struct FiniteNumbers {
  std::string text;
  std::map<size_t, std::string> replaced_digits;  // the replaced numbers, by position among all numbers of the text
};
FiniteNumbers without_overflowing_numbers(std::string_view text);

}  // namespace tessera
