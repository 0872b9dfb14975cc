// GPT-2's byte alphabet: it maps every byte to a printable character. The tokens of byte-level vocabularies are spelled
// with these characters.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::text {

struct ByteAlphabet {
  static constexpr uint32_t kCharEnd = 324;  // all code points of the alphabet are smaller
  std::string utf8_of[256];                  // by byte: its character in UTF-8
  int16_t byte_of[kCharEnd];                 // by code point: its byte; -1 when it is not in the alphabet
};
const ByteAlphabet& byte_alphabet();

// The bytes that `token` spells; nullopt when one of its characters is not in the alphabet.
std::optional<std::string> bytes_of_token(std::string_view token);

}  // namespace tessera::text
