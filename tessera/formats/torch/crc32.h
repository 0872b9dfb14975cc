// CRC-32 of zip and gzip.
//
//   uint32_t crc = 0;
//   for (const auto piece : pieces) crc = crc32(crc, piece);
//
// Pure, thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tessera {

// Of what `crc` covers, followed by `bytes`; 0 covers nothing.
uint32_t crc32(uint32_t crc, std::span<const std::byte> bytes);

}  // namespace tessera
