// Follows a file that another process appends to, and returns each line once.
//
//   GrowingLines lines("runs/demo/metrics.jsonl");
//   if (!lines.is_continued()) ...             // the file was replaced: earlier lines are not valid any more
//   lines.read([&](std::string_view line) { ... });
//
// The object keeps only the position in the file, a few bytes before it, and an incomplete last line. Not thread-safe.
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
  static constexpr size_t kLongestLine = size_t{8} << 20;  // bytes; a longer line is returned as an empty one

  explicit GrowingLines(std::filesystem::path path) : path_(std::move(path)) {}
  const std::filesystem::path& path() const { return path_; }

  // Whether the file still begins with the bytes that read() has read. False if the file was removed, replaced or cut
  // since read() (a resumed run drops lines of steps that it repeats), or if the last bytes that were read have
  // changed. Call restart() then. Error kIo.
  bool is_continued() const;
  // Makes read() begin at the start of the file again.
  void restart();
  // Calls `on_line` with each line that is complete since the last call, without its newline. Text after the last
  // newline is kept until its line is complete. A missing file counts as empty. Error kIo.
  void read(const std::function<void(std::string_view)>& on_line);

 private:
  struct OpenFile {
    UniqueFd file;
    uint64_t inode = 0, size = 0;
  };
  OpenFile open() const;

  std::filesystem::path path_;
  uint64_t inode_ = 0, offset_ = 0;  // offset_: position of the next byte to read
  std::string partial_line_;         // the incomplete last line
  bool too_long_ = false;            // the incomplete line exceeds kLongestLine and is not kept
  std::string tail_;                 // the last bytes before offset_, at most kTail
};

}  // namespace tessera::report
