// The code points of UTF-8 strings, like those of Python's str. Each byte that is not UTF-8 counts as one code point.
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
CodePoint code_point_at(std::string_view text, size_t at);  // the code point that starts at byte `at`
void append_code_point(std::string& out, int32_t code_point);
size_t count_code_points(std::string_view text);
// The number of bytes of the first `code_points` code points; text.size() when there are fewer.
size_t byte_offset(std::string_view text, size_t code_points);

// Calls visit(bytes, code) for each code point in order.
template <class Visit>
void for_each_code_point(std::string_view text, Visit visit) {
  for (size_t at = 0; at < text.size();) {
    const auto [code, bytes] = code_point_at(text, at);
    visit(text.substr(at, bytes), code);
    at += bytes;
  }
}

// Returns whether the function Wanted is true for at least one code point and the function Other for none, as
// str.islower and str.isupper do for lower and upper case.
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
bool is_printable(int32_t code_point);  // str.isprintable; repr escapes all other characters
bool is_letter(int32_t code_point);
bool is_digit(int32_t code_point);
bool is_upper(int32_t code_point);
bool is_lower(int32_t code_point);
std::string upper(std::string_view text);
std::string lower(std::string_view text);
std::string capitalize(std::string_view text);
std::string title(std::string_view text);

// str.strip: removes whitespace, or the code points in `characters`, at the given ends.
std::string_view strip(std::string_view text, bool left, bool right);
std::string_view strip(std::string_view text, bool left, bool right, std::string_view characters);
// The opposite of strip(): removes all code points up to the next whitespace at the given ends.
std::string_view strip_word(std::string_view text, bool left, bool right);

}  // namespace tessera::text::jinja
