#include "tessera/text/tokenizer/byte_level.h"

#include <algorithm>

namespace tessera::text {

const ByteAlphabet& byte_alphabet() {
  static const ByteAlphabet alphabet = [] {
    ByteAlphabet result;
    std::fill(std::begin(result.byte_of), std::end(result.byte_of), int16_t{-1});
    uint32_t next = 256;  // bytes that are not printable get the code points from 256 on, in order
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
      const uint32_t code = printable ? byte : next++;
      append_utf8(code, result.utf8_of[byte]);
      result.byte_of[code] = static_cast<int16_t>(byte);
    }
    return result;
  }();
  return alphabet;
}

std::optional<std::string> bytes_of_token(std::string_view token) {
  const auto& alphabet = byte_alphabet();
  std::string bytes;
  bytes.reserve(token.size());
  for (size_t i = 0; i < token.size();) {
    const auto c = decode_utf8(token.data() + i);
    if (c.code >= ByteAlphabet::kCharEnd || alphabet.byte_of[c.code] < 0) return std::nullopt;
    bytes += static_cast<char>(alphabet.byte_of[c.code]);
    i += c.length;
  }
  return bytes;
}

}  // namespace tessera::text
