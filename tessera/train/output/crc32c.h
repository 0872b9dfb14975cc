// CRC-32C (Castagnoli, polynomial 0x1edc6f41 reflected), the checksum of TFRecord files.
//
//   crc32c("123456789")   // 0xe3069283
//
// Pure, thread-safe.
#pragma once

#include <cstdint>
#include <string_view>

namespace tessera::train {

uint32_t crc32c(std::string_view bytes) noexcept;

// The CRC with TFRecord's masking. The masking keeps the CRC of data that itself contains CRCs well distributed.
uint32_t masked_crc32c(std::string_view bytes) noexcept;

}  // namespace tessera::train
