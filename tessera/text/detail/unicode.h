// UTF-8 and the character classes that pre-tokenizers ask for.
//
//   for (const char* p = text; p < end; p += c.length) { c = decode_utf8(p, end); if (char_class(c.code) & kLetter) ... }
//
// Classes follow general categories (Letter, Number, Mark, Punctuation) and the White_Space property. Punctuation is that
// of the tokenizers library, whose table of it stopped at Unicode 8.0. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::text {

enum CharClass : uint8_t {
  kLetter = 1,        // category L*
  kNumber = 2,        // category N*
  kSpace = 4,         // White_Space
  kPunctuation = 8,   // category P* as of Unicode 8.0, and every ASCII sign
  kMark = 16,         // category M*
  kWord = 32,         // Rust's \w: Alphabetic, M, Nd, Pc, Join_Control
  kNfcUnsafe = 64,    // changes under NFC, or may combine with what stands before it
};

struct CharTable {
  static constexpr uint32_t kPages = 0x110000 >> 8;
  uint8_t ascii[128];
  uint16_t page_of[kPages];       // into pages
  std::string pages;              // 256 classes each, equal pages stored once
};

// Built on first use.
const CharTable& char_table();

inline uint8_t char_class(const CharTable& table, uint32_t code) {
  if (code < 128) return table.ascii[code];
  return static_cast<uint8_t>(table.pages[(size_t{table.page_of[code >> 8]} << 8) | (code & 255)]);
}
inline uint8_t char_class(uint32_t code) { return char_class(char_table(), code); }

struct Decoded {
  uint32_t code;
  uint32_t length;
};

// The character at p; the text must be valid UTF-8 and p < its end.
inline Decoded decode_utf8(const char* p) {
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

// Length of the longest valid prefix.
size_t valid_utf8_prefix(std::string_view text);
inline bool is_valid_utf8(std::string_view text) { return valid_utf8_prefix(text) == text.size(); }
// How many bytes at the front of `text`, which starts with an invalid sequence, become one U+FFFD:
// the longest prefix of a valid character, at least one byte.
size_t invalid_utf8_length(std::string_view text);
// Appends `bytes` with each invalid sequence as U+FFFD.
void append_lossy(std::string_view bytes, std::string& out);

}  // namespace tessera::text
