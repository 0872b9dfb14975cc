// Code points of UTF-8 strings, as Python's str sees them. Bytes that are not UTF-8 count as one code point each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "tessera/base/text/utf8.h"

namespace tessera::text::jinja {

bool is_ascii_only(std::string_view text);
size_t code_point_bytes(std::string_view text, size_t at);  // length of the code point that starts there
int32_t code_point_at(std::string_view text, size_t at);
void append_code_point(std::string& out, int32_t code_point);
size_t count_code_points(std::string_view text);
size_t byte_offset(std::string_view text, size_t code_points);  // of the n-th code point; the size when past the end

template <class Visit>
void for_each_code_point(std::string_view text, Visit visit) {
  for (size_t at = 0; at < text.size();) {
    const size_t bytes = code_point_bytes(text, at);
    visit(text.substr(at, bytes));
    at += bytes;
  }
}

// True for a text with a character that is wanted and none of the others: str.islower and str.isupper.
template <bool (*Wanted)(int32_t), bool (*Other)(int32_t)>
bool is_cased(std::string_view text) {
  bool any = false, other = false;
  for_each_code_point(text, [&](std::string_view one) {
    any |= Wanted(code_point_at(one, 0));
    other |= Other(code_point_at(one, 0));
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

}  // namespace tessera::text::jinja
