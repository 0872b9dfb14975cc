// The character classes that normalizers and pre-tokenizers use.
//
//   for (const char* p = text; p < end; p += c.length) { c = decode_utf8(p); if (char_class(c.code) & kLetter) ... }
//
// Classes are Unicode general categories (Letter, Number, Mark, Punctuation) and the White_Space property. Punctuation
// is that of Unicode 8.0, because the table of the `tokenizers` library has this version. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "tessera/base/text/utf8.h"

namespace tessera::text {

enum CharClass : uint8_t {
  kLetter = 1,       // category L*
  kNumber = 2,       // category N*
  kSpace = 4,        // White_Space
  kPunctuation = 8,  // category P* of Unicode 8.0, and every ASCII symbol
  kMark = 16,        // category M*
  kWord = 32,        // Rust's \w: Alphabetic, M, Nd, Pc, Join_Control
  kNfcUnsafe = 64,   // changes under NFC, or may combine with the character before it
};

struct CharTable {
  static constexpr uint32_t kPages = 0x110000 >> 8;
  uint8_t ascii[128];
  uint16_t page_of[kPages];  // by code point / 256: an index of a page in `pages`
  std::string pages;         // one byte of CharClass bits per code point, 256 per page; equal pages are stored once
};

// Returns the table with the CharClass bits of all code points; the first call builds it.
const CharTable& char_table();

inline uint8_t char_class(const CharTable& table, uint32_t code) {
  if (code < 128) return table.ascii[code];
  return static_cast<uint8_t>(table.pages[(size_t{table.page_of[code >> 8]} << 8) | (code & 255)]);
}
inline uint8_t char_class(uint32_t code) { return char_class(char_table(), code); }

}  // namespace tessera::text
