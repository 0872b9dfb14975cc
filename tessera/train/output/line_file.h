// A file of JSON objects, one per line, each with a "step". A resumed run continues the file.
//
//   LineFile metrics("runs/demo/metrics.jsonl");
//   metrics.keep_until(120, staging);     // drops the lines of steps that the resumed run repeats
//   metrics.open();
//   metrics.append(R"({"step":121})");
//
// A line is written completely or not at all. Not thread-safe.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>
#include <utility>

#include "tessera/base/files/unique_fd.h"

namespace tessera::train {

class LineFile {
 public:
  explicit LineFile(std::filesystem::path path) : path_(std::move(path)) {}
  const std::filesystem::path& path() const { return path_; }
  // Drops the lines of steps after `last_step`, lines without a step, and an incomplete last line. `staging`: a folder
  // on the same file system. Error kIo leaves the file unchanged.
  void keep_until(int64_t last_step, const std::filesystem::path& staging);
  // Opens the file for appending. Error kIo.
  void open();
  // Appends `line`, which has no newline. Error kIo (full disk) leaves the file unchanged. Needs open().
  void append(std::string_view line);

 private:
  std::filesystem::path path_;
  UniqueFd file_;
};

}  // namespace tessera::train
