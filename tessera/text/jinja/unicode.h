// Code points of UTF-8 strings, as Python's str sees them. Bytes that are not UTF-8 count as one code point each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "tessera/base/text/utf8.h"

namespace tessera::text::jinja {

bool is_ascii_only(std::string_view text);
struct CodePoint {
  int32_t code;
  size_t bytes;
};
CodePoint code_point_at(std::string_view text, size_t at);  // the one that starts there
void append_code_point(std::string& out, int32_t code_point);
size_t count_code_points(std::string_view text);
size_t byte_offset(std::string_view text, size_t code_points);  // of the n-th code point; the size when past the end

// Calls visit(bytes, code) for each.
template <class Visit>
void for_each_code_point(std::string_view text, Visit visit) {
  for (size_t at = 0; at < text.size();) {
    const auto [code, bytes] = code_point_at(text, at);
    visit(text.substr(at, bytes), code);
    at += bytes;
  }
}

// True for a text with a character that is wanted and none of the others: str.islower and str.isupper.
template <bool (*Wanted)(int32_t), bool (*Other)(int32_t)>
bool is_cased(std::string_view text) {
  bool any = false, other = false;
  for_each_code_point(text, [&](std::string_view, int32_t c) {
    any |= Wanted(c);
    other |= Other(c);
  });
  return any && !other;
}

bool is_space(int32_t code_point);      // str.isspace
bool is_printable(int32_t code_point);  // as repr decides what to escape
bool is_letter(int32_t code_point);
bool is_digit(int32_t code_point);
bool is_upper(int32_t code_point);
bool is_lower(int32_t code_point);
std::string upper(std::string_view text);
std::string lower(std::string_view text);
std::string capitalize(std::string_view text);
std::string title(std::string_view text);

// str.strip: whitespace, or any code point of `characters`.
std::string_view strip(std::string_view text, bool left, bool right);
std::string_view strip(std::string_view text, bool left, bool right, std::string_view characters);
// The opposite: takes away what is no whitespace.
std::string_view strip_word(std::string_view text, bool left, bool right);

}  // namespace tessera::text::jinja
