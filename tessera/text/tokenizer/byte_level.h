// GPT-2's byte alphabet: every byte has a printable character, and byte-level vocabularies are spelled in those.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::text {

struct ByteAlphabet {
  static constexpr uint32_t kCharEnd = 324;  // characters are below this
  std::string utf8_of[256];                  // the byte's character
  int16_t byte_of[kCharEnd];                 // -1: no byte
};
const ByteAlphabet& byte_alphabet();

// The bytes that `token` spells, or nothing when a character is outside the alphabet.
std::optional<std::string> bytes_of_token(std::string_view token);

}  // namespace tessera::text
