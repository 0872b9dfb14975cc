#include "tessera/text/jinja/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <vector>

namespace tessera::text::jinja {

bool is_ascii_only(std::string_view text) {
  return std::ranges::all_of(text, [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

// If no valid UTF-8 character starts at `at`, the result is one byte long and its code is the value of this byte.
CodePoint code_point_at(std::string_view text, size_t at) {
  if (const size_t length = utf8_character(text.substr(at)); length > 0) {
    return {static_cast<int32_t>(decode_utf8(text.data() + at).code), length};
  }
  return {static_cast<unsigned char>(text[at]), 1};
}

void append_code_point(std::string& out, int32_t code_point) { append_utf8(static_cast<uint32_t>(code_point), out); }

size_t count_code_points(std::string_view text) {
  size_t count = 0;
  for_each_code_point(text, [&](std::string_view, int32_t) { ++count; });
  return count;
}

size_t byte_offset(std::string_view text, size_t code_points) {
  size_t at = 0;
  for (; code_points > 0 && at < text.size(); --code_points) at += code_point_at(text, at).bytes;
  return at;
}

bool is_space(int32_t c) {
  if (c < 0x80) return c == ' ' || (c >= 9 && c <= 13) || (c >= 0x1c && c <= 0x1f);
  return c == 0x85 || c == 0xa0 || utf8proc_category(c) == UTF8PROC_CATEGORY_ZS || c == 0x2028 || c == 0x2029;
}

bool is_printable(int32_t c) {
  if (c < 0x80) return c >= 0x20 && c < 0x7f;
  const auto category = utf8proc_category(c);
  return category != UTF8PROC_CATEGORY_CN && category < UTF8PROC_CATEGORY_ZS;  // utf8proc numbers Z* and C* last
}

bool is_letter(int32_t c) {
  const auto category = utf8proc_category(c);
  return category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO;
}

bool is_digit(int32_t c) { return utf8proc_category(c) == UTF8PROC_CATEGORY_ND; }
bool is_upper(int32_t c) { return utf8proc_category(c) == UTF8PROC_CATEGORY_LU; }
bool is_lower(int32_t c) { return utf8proc_category(c) == UTF8PROC_CATEGORY_LL; }

namespace {
void append_upper(std::string& out, int32_t c) {
  if (c == 0xdf) {
    out += "SS";  // U+00DF, the one common letter whose upper case has two letters
  } else {
    append_code_point(out, utf8proc_toupper(c));
  }
}

template <class Map>
std::string mapped(std::string_view text, Map map) {
  std::string out;
  out.reserve(text.size());
  for_each_code_point(text, [&](std::string_view, int32_t c) { map(out, c); });
  return out;
}
}  // namespace

std::string upper(std::string_view text) { return mapped(text, append_upper); }

std::string lower(std::string_view text) {
  return mapped(text, [](std::string& out, int32_t c) { append_code_point(out, utf8proc_tolower(c)); });
}

std::string capitalize(std::string_view text) {
  bool first = true;
  return mapped(text, [&](std::string& out, int32_t c) {
    append_code_point(out, first ? utf8proc_totitle(c) : utf8proc_tolower(c));
    first = false;
  });
}

// str.title: a letter after a character without case begins a word.
std::string title(std::string_view text) {
  bool inside = false;
  return mapped(text, [&](std::string& out, int32_t c) {
    const bool cased = is_upper(c) || is_lower(c);
    append_code_point(out, inside ? utf8proc_tolower(c) : utf8proc_totitle(c));
    inside = cased;
  });
}

namespace {
// Removes code points for which strips(bytes) is true, at the left end if `left` is set and at the right end if `right`
// is set. To find the last code point, the function goes back over at most three continuation bytes; if the bytes from
// there on do not form one character, the last byte alone counts as a code point.
template <class Strips>
std::string_view strip_if(std::string_view text, bool left, bool right, Strips strips) {
  while (left && !text.empty()) {
    const size_t bytes = code_point_at(text, 0).bytes;
    if (!strips(text.substr(0, bytes))) break;
    text.remove_prefix(bytes);
  }
  while (right && !text.empty()) {
    size_t at = text.size() - 1;
    while (at > 0 && text.size() - at < 4 && (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80) --at;
    if (at + code_point_at(text, at).bytes != text.size()) at = text.size() - 1;
    if (!strips(text.substr(at))) break;
    text = text.substr(0, at);
  }
  return text;
}
}  // namespace

std::string_view strip(std::string_view text, bool left, bool right) {
  return strip_if(text, left, right, [](std::string_view one) { return is_space(code_point_at(one, 0).code); });
}

std::string_view strip_word(std::string_view text, bool left, bool right) {
  return strip_if(text, left, right, [](std::string_view one) { return !is_space(code_point_at(one, 0).code); });
}

std::string_view strip(std::string_view text, bool left, bool right, std::string_view characters) {
  std::vector<std::string_view> stripped;
  for_each_code_point(characters, [&](std::string_view one, int32_t) { stripped.push_back(one); });
  std::ranges::sort(stripped);
  return strip_if(text, left, right, [&](std::string_view one) { return std::ranges::binary_search(stripped, one); });
}

}  // namespace tessera::text::jinja
