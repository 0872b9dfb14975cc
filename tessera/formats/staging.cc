#include "tessera/formats/staging.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "tessera/base/error.h"
#include "tessera/base/file.h"

namespace tessera {
namespace {

std::filesystem::path beside(const std::filesystem::path& path) {
  return path.string() + ".tmp." + std::to_string(::getpid());
}

std::filesystem::path parent_of(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
}

// "a/b/" and "a/./b" as "a/b", so that the staged sibling is no child of the folder itself.
std::filesystem::path without_trailing_slash(const std::filesystem::path& dir) {
  auto clean = std::filesystem::absolute(dir).lexically_normal();
  return clean.has_filename() ? clean : clean.parent_path();
}

}  // namespace

StagedFile::StagedFile(std::filesystem::path path) : path_(std::move(path)), staged_(beside(path_)) {
  fd_ = ::open(staged_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  TESSERA_CHECK(fd_ >= 0, ErrorKind::kIo, "[file] {}: cannot be created: {}", staged_.string(), std::strerror(errno));
}

StagedFile::~StagedFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(staged_.c_str());
}

void StagedFile::write_at(uint64_t offset, std::span<const std::byte> bytes) {
  size_t written = 0;
  while (written < bytes.size()) {
    const ssize_t step =
        ::pwrite(fd_, bytes.data() + written, bytes.size() - written, static_cast<off_t>(offset + written));
    if (step < 0 && errno == EINTR) continue;
    TESSERA_CHECK(step > 0, ErrorKind::kIo, "[file] {}: cannot be written at byte {}: {}", path_.string(),
                  offset + written, std::strerror(errno));
    written += static_cast<size_t>(step);
  }
}

void StagedFile::publish() {
  TESSERA_CHECK(::fsync(fd_) == 0 && ::rename(staged_.c_str(), path_.c_str()) == 0, ErrorKind::kIo,
                "[file] {}: cannot be published: {}", path_.string(), std::strerror(errno));
  ::close(fd_);
  fd_ = -1;
  sync_folder(parent_of(path_));
}

StagedFolder::StagedFolder(const std::filesystem::path& dir)
    : dir_(without_trailing_slash(dir)), staged_(beside(dir_)) {
  std::error_code error;
  const auto status = std::filesystem::symlink_status(dir_, error);
  const bool absent = status.type() == std::filesystem::file_type::not_found;
  const bool empty_folder = std::filesystem::is_directory(status) && std::filesystem::is_empty(dir_, error) && !error;
  TESSERA_CHECK(absent || empty_folder, ErrorKind::kIo,
                "[file] {}: exists already. Name a folder that does not exist, or an empty one.", dir_.string());
  std::filesystem::create_directories(parent_of(dir_), error);
  std::filesystem::remove_all(staged_, error);
  TESSERA_CHECK(std::filesystem::create_directory(staged_, error), ErrorKind::kIo, "[file] {}: cannot be created: {}",
                staged_.string(), error.message());
}

StagedFolder::~StagedFolder() {
  std::error_code ignored;
  if (!published_) std::filesystem::remove_all(staged_, ignored);
}

void StagedFolder::publish() {
  sync_folder(staged_);
  TESSERA_CHECK(::rename(staged_.c_str(), dir_.c_str()) == 0, ErrorKind::kIo, "[file] {}: cannot be published: {}",
                dir_.string(), std::strerror(errno));
  published_ = true;
  sync_folder(parent_of(dir_));
}

}  // namespace tessera
