#include "tessera/formats/torch/crc32.h"

#include <array>
#include <bit>
#include <cstring>

namespace tessera {
namespace {

static_assert(std::endian::native == std::endian::little, "the tables are applied to little-endian words");

using CrcTables = std::array<std::array<uint32_t, 256>, 16>;

// Table k: the effect of a byte that k more bytes follow.
constexpr CrcTables make_crc_tables() {
  CrcTables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0xEDB88320U : 0U);
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < tables.size(); ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

constexpr CrcTables kCrcTables = make_crc_tables();

uint32_t crc_word(uint32_t word, size_t last_table) {
  return kCrcTables[last_table + 3][word & 0xFF] ^ kCrcTables[last_table + 2][word >> 8 & 0xFF] ^
         kCrcTables[last_table + 1][word >> 16 & 0xFF] ^ kCrcTables[last_table][word >> 24];
}

}  // namespace

uint32_t crc32(uint32_t crc, std::span<const std::byte> bytes) {
  crc = ~crc;
  const std::byte* at = bytes.data();
  size_t left = bytes.size();
  for (; left >= 16; left -= 16, at += 16) {
    std::array<uint32_t, 4> words;
    std::memcpy(words.data(), at, 16);
    crc = crc_word(words[0] ^ crc, 12) ^ crc_word(words[1], 8) ^ crc_word(words[2], 4) ^ crc_word(words[3], 0);
  }
  for (; left > 0; --left, ++at) crc = (crc >> 8) ^ kCrcTables[0][(crc ^ static_cast<uint32_t>(*at)) & 0xFF];
  return ~crc;
}

}  // namespace tessera
