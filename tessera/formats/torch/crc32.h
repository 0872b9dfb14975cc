// The CRC-32 of zip and gzip.
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

// Extends `crc`, the CRC-32 of earlier bytes, by `bytes`. Pass 0 as `crc` when there are no earlier bytes.
uint32_t crc32(uint32_t crc, std::span<const std::byte> bytes);

}  // namespace tessera
