#include "tessera/base/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tessera/base/error.h"

namespace tessera {

std::string read_file(const std::filesystem::path& path, size_t limit_bytes) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  TESSERA_CHECK(fd >= 0, ErrorKind::kIo, "[file] {}: cannot be opened for reading: {}", path.string(), std::strerror(errno));
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

void publish_file(const std::filesystem::path& path, std::string_view content) {
  const auto temporary = path.string() + ".tmp." + std::to_string(::getpid());
  const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  TESSERA_CHECK(fd >= 0, ErrorKind::kIo, "[file] {}: cannot be created: {}", temporary, std::strerror(errno));
  size_t written = 0;
  bool ok = true;
  while (ok && written < content.size()) {
    const ssize_t step = ::write(fd, content.data() + written, content.size() - written);
    if (step < 0 && errno == EINTR) continue;
    ok = step > 0;
    if (ok) written += static_cast<size_t>(step);
  }
  ok = ok && ::fsync(fd) == 0;
  int reason = errno;
  ::close(fd);
  if (ok && ::rename(temporary.c_str(), path.c_str()) != 0) {
    ok = false;
    reason = errno;
  }
  if (!ok) {
    ::unlink(temporary.c_str());
    raise(ErrorKind::kIo, "[file] {}: cannot be written ({} of {} bytes): {}", path.string(), written, content.size(),
          std::strerror(reason));
  }
  sync_folder(path.has_parent_path() ? path.parent_path() : std::filesystem::path("."));
}

void sync_folder(const std::filesystem::path& folder) {
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  ::fsync(fd);
  ::close(fd);
}

}  // namespace tessera
