#include "tessera/base/text/utf8.h"

#include <cstring>

namespace tessera {
namespace {

// Length of the valid character at the start of [p, end), or 0. Rejects overlong forms (C0, C1, E0 80, F0 80),
// surrogates (ED A0) and codes above U+10FFFF (F4 90).
size_t valid_char(const unsigned char* p, const unsigned char* end) {
  const auto left = static_cast<size_t>(end - p);
  const auto tail = [&](size_t i) { return (p[i] & 0xC0) == 0x80; };
  if (p[0] < 0x80) return 1;
  if (p[0] < 0xC2) return 0;
  if (p[0] < 0xE0) return left >= 2 && tail(1) ? 2 : 0;
  if (p[0] < 0xF0) {
    if (left < 3 || !tail(1) || !tail(2)) return 0;
    if ((p[0] == 0xE0 && p[1] < 0xA0) || (p[0] == 0xED && p[1] >= 0xA0)) return 0;
    return 3;
  }
  if (p[0] > 0xF4 || left < 4 || !tail(1) || !tail(2) || !tail(3)) return 0;
  if ((p[0] == 0xF0 && p[1] < 0x90) || (p[0] == 0xF4 && p[1] >= 0x90)) return 0;
  return 4;
}

}  // namespace

void append_utf8(uint32_t code, std::string& out) {
  if (code < 0x80) {
    out += static_cast<char>(code);
  } else if (code < 0x800) {
    out += {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))};
  } else if (code < 0x10000) {
    out += {static_cast<char>(0xE0 | code >> 12), static_cast<char>(0x80 | (code >> 6 & 0x3F)),
            static_cast<char>(0x80 | (code & 0x3F))};
  } else {
    out += {static_cast<char>(0xF0 | code >> 18), static_cast<char>(0x80 | (code >> 12 & 0x3F)),
            static_cast<char>(0x80 | (code >> 6 & 0x3F)), static_cast<char>(0x80 | (code & 0x3F))};
  }
}

size_t utf8_character(std::string_view text) {
  const auto* begin = reinterpret_cast<const unsigned char*>(text.data());
  return text.empty() ? 0 : valid_char(begin, begin + text.size());
}

size_t valid_utf8_prefix(std::string_view text) {
  const auto* begin = reinterpret_cast<const unsigned char*>(text.data());
  const auto* end = begin + text.size();
  const auto* p = begin;
  while (p < end) {
    // Skips eight ASCII bytes at a time.
    while (end - p >= 8) {
      uint64_t word;
      std::memcpy(&word, p, 8);
      if (word & 0x8080808080808080u) break;
      p += 8;
    }
    if (p == end) break;
    const size_t length = valid_char(p, end);
    if (length == 0) break;
    p += length;
  }
  return static_cast<size_t>(p - begin);
}

size_t invalid_utf8_length(std::string_view text) {
  const auto* p = reinterpret_cast<const unsigned char*>(text.data());
  const size_t left = text.size();
  if (p[0] < 0xC2 || p[0] > 0xF4 || left < 2) return 1;
  unsigned char low = 0x80, high = 0xBF;  // range of the second byte
  if (p[0] == 0xE0) low = 0xA0;
  if (p[0] == 0xED) high = 0x9F;
  if (p[0] == 0xF0) low = 0x90;
  if (p[0] == 0xF4) high = 0x8F;
  if (p[1] < low || p[1] > high) return 1;
  if (p[0] < 0xF0) return 2;
  return left > 2 && (p[2] & 0xC0) == 0x80 ? 3 : 2;
}

void append_lossy(std::string_view bytes, std::string& out) {
  while (!bytes.empty()) {
    const size_t good = valid_utf8_prefix(bytes);
    out.append(bytes.substr(0, good));
    bytes.remove_prefix(good);
    if (bytes.empty()) return;
    out += "\xEF\xBF\xBD";
    bytes.remove_prefix(invalid_utf8_length(bytes));
  }
}

}  // namespace tessera
