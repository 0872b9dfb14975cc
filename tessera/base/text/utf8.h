// Checks, decodes and encodes UTF-8.
//
//   size_t good = valid_utf8_prefix(bytes);                       // bytes.size() when all bytes are UTF-8
//   for (const char* p = text.data(); p < end; p += c.length) { c = decode_utf8(p); ... }   // valid text only
//
// Pure, thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera {

struct Utf8Character {
  uint32_t code;
  uint32_t length;
};

// The character at p; the text must be valid UTF-8 and p < its end.
inline Utf8Character decode_utf8(const char* p) {
  const auto* b = reinterpret_cast<const unsigned char*>(p);
  if (b[0] < 0x80) return {b[0], 1};
  if (b[0] < 0xE0) return {(b[0] & 0x1Fu) << 6 | (b[1] & 0x3Fu), 2};
  if (b[0] < 0xF0) return {(b[0] & 0x0Fu) << 12 | (b[1] & 0x3Fu) << 6 | (b[2] & 0x3Fu), 3};
  return {(b[0] & 0x07u) << 18 | (b[1] & 0x3Fu) << 12 | (b[2] & 0x3Fu) << 6 | (b[3] & 0x3Fu), 4};
}
inline uint32_t utf8_length(char first) {
  const auto b = static_cast<unsigned char>(first);
  return b < 0x80 ? 1 : b < 0xE0 ? 2 : b < 0xF0 ? 3 : 4;
}
// Start of the character that ends before p; text[0] starts a character and p > text.
inline const char* previous_char(const char* p) {
  do --p;
  while ((static_cast<unsigned char>(*p) & 0xC0) == 0x80);
  return p;
}
void append_utf8(uint32_t code, std::string& out);

// Length in bytes of the character at the start of `text`, 0 if it does not start with a valid character.
size_t utf8_character(std::string_view text);
// Length of the longest valid prefix.
size_t valid_utf8_prefix(std::string_view text);
inline bool is_valid_utf8(std::string_view text) { return valid_utf8_prefix(text) == text.size(); }
// The number of bytes at the start of `text`, which begins with an invalid sequence, that become one U+FFFD: the
// longest prefix of a valid character, at least one byte.
size_t invalid_utf8_length(std::string_view text);
// Appends `bytes`, with each invalid sequence replaced by U+FFFD.
void append_lossy(std::string_view bytes, std::string& out);

}  // namespace tessera
