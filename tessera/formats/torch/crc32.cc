#include "tessera/formats/torch/crc32.h"

#include <libdeflate.h>

namespace tessera {

uint32_t crc32(uint32_t crc, std::span<const std::byte> bytes) {
  return bytes.empty() ? crc : libdeflate_crc32(crc, bytes.data(), bytes.size());
}

}  // namespace tessera
