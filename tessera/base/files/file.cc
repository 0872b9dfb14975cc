#include "tessera/base/files/file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/files/staged.h"
#include "tessera/base/files/unique_fd.h"

namespace tessera {

std::string read_file(const std::filesystem::path& path, size_t limit_bytes) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  TESSERA_CHECK(file.open(), ErrorKind::kIo, "[file] {}: cannot be opened for reading: {}", path.string(),
                std::strerror(errno));
  std::string content;
  char buffer[1 << 16];
  ssize_t bytes_read = 0;
  while ((bytes_read = ::read(file.get(), buffer, sizeof buffer)) > 0) {
    content.append(buffer, static_cast<size_t>(bytes_read));
    TESSERA_CHECK(content.size() <= limit_bytes, ErrorKind::kFormat, "[file] {}: larger than the {} bytes allowed here",
                  path.string(), limit_bytes);
  }
  TESSERA_CHECK(bytes_read == 0, ErrorKind::kIo, "[file] {}: cannot be read: {}", path.string(), std::strerror(errno));
  return content;
}

void publish_file(const std::filesystem::path& path, std::string_view content) { publish_file(path, content, {}); }

void sync_folder(const std::filesystem::path& folder) {
  const UniqueFd opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (opened.open()) ::fsync(opened.get());
}

}  // namespace tessera
