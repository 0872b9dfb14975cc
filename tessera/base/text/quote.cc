#include "tessera/base/text/quote.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <utility>

#include "tessera/base/text/utf8.h"

namespace tessera {
namespace {

// Whether escape() writes the code point as an escape sequence. This is so for control characters, line separators,
// direction marks, joiners, variation selectors, tags, private use, and codes that are no characters.
bool is_hidden(uint32_t code) {
  static constexpr std::pair<uint32_t, uint32_t> kHidden[] = {
      {0x00, 0x1F},     {0x7F, 0x9F},       {0xAD, 0xAD},       {0x61C, 0x61C},     {0x180E, 0x180E}, {0x200B, 0x200F},
      {0x2028, 0x202E}, {0x2060, 0x206F},   {0xE000, 0xF8FF},   {0xFE00, 0xFE0F},   {0xFEFF, 0xFEFF}, {0xFFF0, 0xFFFC},
      {0xFFFE, 0xFFFF}, {0x1BCA0, 0x1BCA3}, {0x1D173, 0x1D17A}, {0xE0000, 0x10FFFF}};
  for (const auto& [first, last] : kHidden) {
    if (code >= first && code <= last) return true;
  }
  return false;
}

}  // namespace

std::string escape(std::string_view text, size_t limit_bytes) {
  std::string out;
  size_t at = 0;
  while (at < text.size()) {
    const size_t length = utf8_character(text.substr(at));
    const uint32_t code = length == 0 ? 0 : decode_utf8(text.data() + at).code;
    if (at + (length == 0 ? 1 : length) > limit_bytes) break;
    if (length == 0) {
      fmt::format_to(std::back_inserter(out), "\\x{:02x}", static_cast<unsigned char>(text[at]));
    } else if (code == '\n' || code == '\r' || code == '\t') {
      out += code == '\n' ? "\\n" : code == '\r' ? "\\r" : "\\t";
    } else if (is_hidden(code)) {
      out += code < 0x100     ? fmt::format("\\x{:02x}", code)
             : code < 0x10000 ? fmt::format("\\u{:04x}", code)
                              : fmt::format("\\U{:08x}", code);
    } else {
      out.append(text.substr(at, length));
    }
    at += length == 0 ? 1 : length;
  }
  return at < text.size() ? out + "..." : out;
}

std::string quote(std::string_view text, size_t limit_bytes) { return "'" + escape(text, limit_bytes) + "'"; }

std::string escape_controls(std::string_view text, std::string_view mark) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t length = utf8_character(text.substr(at));
    const uint32_t code = length == 0 ? static_cast<unsigned char>(text[at]) : decode_utf8(text.data() + at).code;
    const bool is_control = code < 0x20 || (code >= 0x7F && code < 0xA0);
    if (length == 0 || (is_control && code != '\n' && code != '\t')) {
      fmt::format_to(std::back_inserter(out), "{}{:02x}", mark, code);
    } else {
      out.append(text.substr(at, length));
    }
    at += std::max<size_t>(length, 1);
  }
  return out;
}

}  // namespace tessera
