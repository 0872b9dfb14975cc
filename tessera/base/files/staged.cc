#include "tessera/base/files/staged.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/text/random_hex.h"

namespace tessera {
namespace {

std::filesystem::path parent_of(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
}

// "a/b/" and "a/./b" become "/.../a/b", so the staged folder is created next to the folder and not inside it.
std::filesystem::path without_trailing_slash(const std::filesystem::path& dir) {
  auto clean = std::filesystem::absolute(dir).lexically_normal();
  return clean.has_filename() ? clean : clean.parent_path();
}

}  // namespace

std::filesystem::path create_temporary(const std::filesystem::path& folder, const std::string& stem,
                                       const std::function<int(const std::filesystem::path&)>& make) {
  constexpr size_t kLongestStem = 200;  // leaves room in the 255 bytes of a file name
  for (int attempt = 0;; ++attempt) {
    auto path = folder / fmt::format(".{}.{}.tmp", stem.substr(0, kLongestStem), random_hex(8));
    const int reason = make(path);
    if (reason == 0) return path;
    TESSERA_CHECK(reason == EEXIST && attempt < 16, ErrorKind::kIo, "[file] {}: cannot be created: {}",
                  (folder / stem).string(), std::strerror(reason));
  }
}

StagedFile::StagedFile(std::filesystem::path path, const std::filesystem::path& staging) : path_(std::move(path)) {
  staged_ =
      create_temporary(staging.empty() ? parent_of(path_) : staging, path_.filename().string(), [&](const auto& name) {
        file_.reset(::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644));
        return file_.open() ? 0 : errno;
      });
}

StagedFile::~StagedFile() {
  if (file_.open()) ::unlink(staged_.c_str());
}

void StagedFile::write_at(uint64_t offset, std::span<const std::byte> bytes) {
  size_t written = 0;
  while (written < bytes.size()) {
    const ssize_t step =
        ::pwrite(file_.get(), bytes.data() + written, bytes.size() - written, static_cast<off_t>(offset + written));
    if (step < 0 && errno == EINTR) continue;
    TESSERA_CHECK(step > 0, ErrorKind::kIo, "[file] {}: cannot be written at byte {}: {}", path_.string(),
                  offset + written, std::strerror(errno));
    written += static_cast<size_t>(step);
  }
  // After a large write, asks the kernel to start writing these bytes to disk, so the disk works while the caller makes
  // the next bytes. publish() waits for the disk.
  constexpr size_t kLarge = 1 << 20;
  if (written >= kLarge) {
    ::sync_file_range(file_.get(), static_cast<off64_t>(offset), static_cast<off64_t>(written), SYNC_FILE_RANGE_WRITE);
  }
}

// fsync before rename: after a crash PATH has the complete new contents or the old file.
void StagedFile::publish() {
  TESSERA_CHECK(::fsync(file_.get()) == 0 && ::rename(staged_.c_str(), path_.c_str()) == 0, ErrorKind::kIo,
                "[file] {}: cannot be published: {}", path_.string(), std::strerror(errno));
  file_.reset();
  sync_folder(parent_of(path_));
}

void publish_file(const std::filesystem::path& path, std::string_view content, const std::filesystem::path& staging) {
  StagedFile file(path, staging);
  file.write_at(0, std::as_bytes(std::span(content)));
  file.publish();
}

StagedFolder::StagedFolder(const std::filesystem::path& dir) : dir_(without_trailing_slash(dir)) {
  std::error_code error;
  const auto status = std::filesystem::symlink_status(dir_, error);
  const bool absent = status.type() == std::filesystem::file_type::not_found;
  const bool empty_folder = std::filesystem::is_directory(status) && std::filesystem::is_empty(dir_, error) && !error;
  TESSERA_CHECK(absent || empty_folder, ErrorKind::kIo,
                "[file] {}: exists already. Name a folder that does not exist, or an empty one.", dir_.string());
  std::filesystem::create_directories(parent_of(dir_), error);
  staged_ = create_temporary(parent_of(dir_), dir_.filename().string(),
                             [](const auto& name) { return ::mkdir(name.c_str(), 0755) == 0 ? 0 : errno; });
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
