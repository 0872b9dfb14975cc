#include "tessera/base/text/random_hex.h"

#include <fmt/format.h>
#include <sys/random.h>

#include <cerrno>
#include <cstring>

#include "tessera/base/error.h"

namespace tessera {

std::string random_hex(size_t bytes) {
  std::string random_bytes(bytes, '\0');
  for (size_t done = 0; done < bytes;) {
    const auto read_count = ::getrandom(random_bytes.data() + done, bytes - done, 0);
    TESSERA_CHECK(read_count >= 0 || errno == EINTR, ErrorKind::kIo, "getrandom: {}", std::strerror(errno));
    if (read_count > 0) done += static_cast<size_t>(read_count);
  }
  std::string digits;
  for (const char each : random_bytes) digits += fmt::format("{:02x}", static_cast<unsigned char>(each));
  return digits;
}

}  // namespace tessera
