#include "tessera/report/growing_lines.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "tessera/base/error.h"

namespace tessera::report {
namespace {

// The number of bytes before the read position that is_continued() compares. These bytes differ in a file that was cut
// and has grown again, because lines hold measured times, which differ even in a line of the same step.
constexpr size_t kTail = 64;
constexpr size_t kChunk = size_t{1} << 18;

size_t read_at(const UniqueFd& file, uint64_t offset, char* data, size_t bytes, const std::filesystem::path& path) {
  for (;;) {
    const ssize_t got = ::pread(file.get(), data, bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    TESSERA_CHECK(got >= 0, ErrorKind::kIo, "[report] {}: cannot be read: {}", path.string(), std::strerror(errno));
    return static_cast<size_t>(got);
  }
}

}  // namespace

GrowingLines::OpenFile GrowingLines::open() const {
  OpenFile found{.file = UniqueFd(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK))};
  if (!found.file.open()) {
    TESSERA_CHECK(errno == ENOENT || errno == ENOTDIR, ErrorKind::kIo, "[report] {}: cannot be opened: {}",
                  path_.string(), std::strerror(errno));
    return found;
  }
  struct stat info {};
  TESSERA_CHECK(::fstat(found.file.get(), &info) == 0 && S_ISREG(info.st_mode), ErrorKind::kIo,
                "[report] {}: found no regular file", path_.string());
  found.inode = static_cast<uint64_t>(info.st_ino);
  found.size = static_cast<uint64_t>(info.st_size);
  return found;
}

// A file that another file has replaced by rename has another inode. A file that was cut is shorter than offset_; if it
// has grown again since, its bytes before offset_ differ from tail_.
bool GrowingLines::is_continued() const {
  if (offset_ == 0) return true;
  const OpenFile now = open();
  if (!now.file.open() || now.inode != inode_ || now.size < offset_) return false;
  char data[kTail];
  const size_t got = read_at(now.file, offset_ - tail_.size(), data, tail_.size(), path_);
  return std::string_view(data, got) == tail_;
}

void GrowingLines::restart() { *this = GrowingLines(std::move(path_)); }

void GrowingLines::read(const std::function<void(std::string_view)>& on_line) {
  const OpenFile now = open();
  if (!now.file.open()) return;
  inode_ = now.inode;
  std::vector<char> chunk(std::min<uint64_t>(kChunk, now.size > offset_ ? now.size - offset_ : 0));
  while (offset_ < now.size) {  // bytes that are appended meanwhile are left for the next call
    const size_t bytes_to_read = std::min<uint64_t>(chunk.size(), now.size - offset_);
    const size_t got = read_at(now.file, offset_, chunk.data(), bytes_to_read, path_);
    if (got == 0) return;  // the file was cut since open()
    std::string_view unread(chunk.data(), got);
    offset_ += got;
    tail_.append(unread.substr(got - std::min(got, kTail)));
    tail_.erase(0, tail_.size() - std::min(tail_.size(), kTail));
    // on_line() gets a line that lies within this chunk as a view, without a copy. Only a line that began in an earlier
    // chunk is joined in partial_line_.
    for (size_t end; (end = unread.find('\n')) != unread.npos; unread.remove_prefix(end + 1)) {
      if (partial_line_.empty() && !too_long_) {
        on_line(unread.substr(0, end));
        continue;
      }
      partial_line_ += unread.substr(0, end);
      on_line(too_long_ ? std::string_view() : std::string_view(partial_line_));
      partial_line_.clear();
      too_long_ = false;
    }
    if (!too_long_) partial_line_ += unread;
    if (partial_line_.size() > kLongestLine) {
      partial_line_ = std::string();
      too_long_ = true;
    }
  }
}

}  // namespace tessera::report
