#include "tessera/train/output/crc32c.h"

#include <array>

namespace tessera::train {
namespace {

// Entry i is the CRC of the byte i alone; 0x82f63b78 is the polynomial 0x1edc6f41 with its bits reversed.
constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? (crc >> 1) ^ 0x82f63b78u : crc >> 1;
    table[byte] = crc;
  }
  return table;
}
constexpr auto kTable = make_table();

}  // namespace

uint32_t crc32c(std::string_view bytes) noexcept {
  uint32_t crc = ~0u;
  for (const char byte : bytes) crc = kTable[(crc ^ static_cast<unsigned char>(byte)) & 0xff] ^ (crc >> 8);
  return ~crc;
}

uint32_t masked_crc32c(std::string_view bytes) noexcept {
  const uint32_t crc = crc32c(bytes);
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

}  // namespace tessera::train
