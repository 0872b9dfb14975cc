// The character classes that pre-tokenizers ask for.
//
//   for (const char* p = text; p < end; p += c.length) { c = decode_utf8(p); if (char_class(c.code) & kLetter) ... }
//
// Classes follow general categories (Letter, Number, Mark, Punctuation) and the White_Space property. Punctuation is
// that of the tokenizers library, whose table of it stopped at Unicode 8.0. Thread-safe.
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
  kPunctuation = 8,  // category P* as of Unicode 8.0, and every ASCII sign
  kMark = 16,        // category M*
  kWord = 32,        // Rust's \w: Alphabetic, M, Nd, Pc, Join_Control
  kNfcUnsafe = 64,   // changes under NFC, or may combine with what stands before it
};

struct CharTable {
  static constexpr uint32_t kPages = 0x110000 >> 8;
  uint8_t ascii[128];
  uint16_t page_of[kPages];  // into pages
  std::string pages;         // 256 classes each, equal pages stored once
};

// Built on first use.
const CharTable& char_table();

inline uint8_t char_class(const CharTable& table, uint32_t code) {
  if (code < 128) return table.ascii[code];
  return static_cast<uint8_t>(table.pages[(size_t{table.page_of[code >> 8]} << 8) | (code & 255)]);
}
inline uint8_t char_class(uint32_t code) { return char_class(char_table(), code); }

}  // namespace tessera::text
