// Numbers of JSON texts that neither 64 bits nor a double hold, with their digits as they stand in the text.
//
//   const Json call = parse_json(text, "tool call", {.exact_numbers = true});
//   if (const auto digits = exact_digits(call["n"])) print(*digits);      // "12345678901234567890123", "1e400"
//   const std::string again = dump_json(call);                           // the same digits
//
// Python's json keeps integers of any length, so a chat template, a client and a training record see their digits.
// Such a value is no number for nlohmann's own functions (is_number, get, dump); it is its binary value, which no JSON
// text has otherwise. Thread-safe.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/text/json.h"

namespace tessera {

// Nothing for all other values. The view is into the value.
std::optional<std::string_view> exact_digits(const Json& value);
Json exact_number(std::string_view digits);
// Whether the digits are those of an integer: no point and no exponent.
bool is_integer_text(std::string_view digits);
// Infinite where no double holds the number.
double nearest_double(std::string_view digits);

// The text of a value without blanks; bytes that are no UTF-8 become U+FFFD.
std::string dump_json(const Json& value);

// The text with other numbers, of the same length, in place of those that overflow a double.
struct FiniteNumbers {
  std::string text;
  std::map<size_t, std::string> digits;  // those that were there, by their place among all numbers of the text
};
FiniteNumbers without_overflowing_numbers(std::string_view text);

}  // namespace tessera
