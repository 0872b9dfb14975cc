#include "tessera/base/text/random_word.h"

#include <fmt/format.h>
#include <sys/random.h>

#include <cerrno>
#include <cstring>

#include "tessera/base/error.h"

namespace tessera {

std::string random_word(size_t bytes) {
  std::string drawn(bytes, '\0');
  for (size_t done = 0; done < bytes;) {
    const auto came = ::getrandom(drawn.data() + done, bytes - done, 0);
    TESSERA_CHECK(came >= 0 || errno == EINTR, ErrorKind::kIo, "getrandom: {}", std::strerror(errno));
    if (came > 0) done += static_cast<size_t>(came);
  }
  std::string word;
  for (const char each : drawn) word += fmt::format("{:02x}", static_cast<unsigned char>(each));
  return word;
}

}  // namespace tessera
