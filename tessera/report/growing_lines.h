// The lines of a file that others append to, each told once.
//
//   GrowingLines lines("runs/demo/metrics.jsonl");
//   if (!lines.is_continued()) ...             // it is another file by now: what was told of it counts no more
//   lines.read([&](std::string_view line) { ... });
//
// Nothing is kept but the place in the file and a line that has no end yet. Not thread-safe.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

#include "tessera/base/files/unique_fd.h"

namespace tessera::report {

class GrowingLines {
 public:
  static constexpr size_t kLongestLine = size_t{8} << 20;  // a longer one is told as an empty one

  explicit GrowingLines(std::filesystem::path path) : path_(std::move(path)) {}
  const std::filesystem::path& path() const { return path_; }

  // False when the file is gone, was replaced or cut since read() (a resumed run drops what it takes again), or holds
  // something else where it ended; restart() then begins anew. Error kIo.
  bool is_continued() const;
  void restart();
  // What has come since, without newlines; what follows the last newline is being written. A file that is not there is
  // empty. Error kIo.
  void read(const std::function<void(std::string_view)>& take);

 private:
  struct Open {
    UniqueFd file;
    uint64_t inode = 0, size = 0;
  };
  Open open() const;

  std::filesystem::path path_;
  uint64_t inode_ = 0, offset_ = 0;  // offset_: behind the last byte that was read
  std::string begun_;                // the line that is being written
  bool too_long_ = false;            // ... is longer than is kept of it
  std::string tail_;                 // the last bytes before offset_
};

}  // namespace tessera::report
