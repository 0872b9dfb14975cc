#include "tessera/base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tessera/base/error.h"

namespace tessera {

std::shared_ptr<const MappedFile> MappedFile::open(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  TESSERA_CHECK(fd >= 0, ErrorKind::kIo, "[file] {}: cannot be opened for reading: {}", path.string(),
                std::strerror(errno));
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd);
    raise(ErrorKind::kIo, "[file] {}: is not a regular file", path.string());
  }
  const auto size_bytes = static_cast<size_t>(info.st_size);
  void* data = nullptr;
  if (size_bytes > 0) {
    data = ::mmap(nullptr, size_bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    if (data == MAP_FAILED) {
      const int reason = errno;
      ::close(fd);
      raise(ErrorKind::kIo, "[file] {}: {} bytes cannot be mapped: {}", path.string(), size_bytes,
            std::strerror(reason));
    }
  }
  ::close(fd);
  return std::shared_ptr<const MappedFile>(new MappedFile(path, static_cast<const std::byte*>(data), size_bytes));
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<std::byte*>(data_), size_bytes_);
}

}  // namespace tessera
