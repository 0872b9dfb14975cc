#include "tessera/base/text/json_numbers.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>

namespace tessera {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The length of the JSON number at the start of the text; 0 if there is none.
size_t number_length(std::string_view text) {
  size_t at = 0;
  const auto digits = [&] {
    const size_t first = at;
    while (at < text.size() && is_digit(text[at])) ++at;
    return at - first;
  };
  if (at < text.size() && text[at] == '-') ++at;
  if (digits() == 0) return 0;
  if (at < text.size() && text[at] == '.') {
    ++at;
    if (digits() == 0) return 0;
  }
  if (at < text.size() && (text[at] == 'e' || text[at] == 'E')) {
    ++at;
    if (at < text.size() && (text[at] == '+' || text[at] == '-')) ++at;
    if (digits() == 0) return 0;
  }
  return at;
}

// exact_number() values are stored as nlohmann's binary type, which parsed JSON never contains.
bool holds_exact_number(const Json& value) {
  if (value.is_structured()) return std::ranges::any_of(value, holds_exact_number);
  return value.is_binary();
}

std::string plain_text_of(const Json& value) { return value.dump(-1, ' ', false, Json::error_handler_t::replace); }

void append_value(const Json& value, std::string& out) {
  if (const auto digits = exact_digits(value)) {
    out += *digits;
  } else if (value.is_array()) {
    out += '[';
    for (size_t i = 0; i < value.size(); ++i) {
      if (i > 0) out += ',';
      append_value(value[i], out);
    }
    out += ']';
  } else if (value.is_object()) {
    out += '{';
    for (bool first = true; const auto& [key, member] : value.get_ref<const Json::object_t&>()) {
      if (!first) out += ',';
      first = false;
      out += plain_text_of(key) + ":";
      append_value(member, out);
    }
    out += '}';
  } else {
    out += plain_text_of(value);
  }
}

}  // namespace

std::optional<std::string_view> exact_digits(const Json& value) {
  if (!value.is_binary()) return std::nullopt;
  const auto& bytes = value.get_binary();
  return std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

Json exact_number(std::string_view digits) {
  return Json::binary(Json::binary_t::container_type(digits.begin(), digits.end()));
}

bool is_integer_text(std::string_view digits) { return digits.find_first_of(".eE") == digits.npos; }

double nearest_double(std::string_view digits) { return std::strtod(std::string(digits).c_str(), nullptr); }

std::string dump_json(const Json& value) {
  if (!holds_exact_number(value)) return plain_text_of(value);
  std::string out;
  append_value(value, out);
  return out;
}

// Finds numbers outside of strings. An overflowing number is replaced by zeros of the same length ("0.000"), so the
// byte positions in the text do not change. Its digits are stored under its position among all numbers of the text.
FiniteNumbers without_overflowing_numbers(std::string_view text) {
  FiniteNumbers found{.text = std::string(text), .replaced_digits = {}};
  size_t numbers = 0;
  for (size_t at = 0; at < text.size();) {
    if (text[at] == '"') {
      for (++at; at < text.size() && text[at] != '"'; ++at) at += text[at] == '\\' ? 1 : 0;
      ++at;
      continue;
    }
    const size_t length = number_length(text.substr(at));
    if (length == 0) {
      ++at;
      continue;
    }
    const auto digits = text.substr(at, length);
    // Numbers of fewer than 5 characters cannot overflow, so they are not converted: 1e309 is one of the shortest
    // numbers that overflow.
    if (length >= 5 && std::isinf(nearest_double(digits))) {
      found.replaced_digits.emplace(numbers, digits);
      found.text.replace(at, length, "0." + std::string(length - 2, '0'));
    }
    ++numbers;
    at += length;
  }
  return found;
}

}  // namespace tessera
