#include "tessera/base/files/file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/files/staged.h"

namespace tessera {

std::string read_file(const std::filesystem::path& path, size_t limit_bytes) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  TESSERA_CHECK(fd >= 0, ErrorKind::kIo, "[file] {}: cannot be opened for reading: {}", path.string(),
                std::strerror(errno));
  std::string content;
  char buffer[1 << 16];
  ssize_t got = 0;
  while ((got = ::read(fd, buffer, sizeof buffer)) > 0) {
    content.append(buffer, static_cast<size_t>(got));
    if (content.size() > limit_bytes) {
      ::close(fd);
      raise(ErrorKind::kFormat, "[file] {}: larger than the {} bytes allowed here", path.string(), limit_bytes);
    }
  }
  const int reason = errno;
  ::close(fd);
  TESSERA_CHECK(got == 0, ErrorKind::kIo, "[file] {}: cannot be read: {}", path.string(), std::strerror(reason));
  return content;
}

void publish_file(const std::filesystem::path& path, std::string_view content) { publish_file(path, content, {}); }

void sync_folder(const std::filesystem::path& folder) {
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  ::fsync(fd);
  ::close(fd);
}

}  // namespace tessera
