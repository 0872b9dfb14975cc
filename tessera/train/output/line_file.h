// A file of JSON objects, one a line with its "step", that a resumed run goes on with.
//
//   LineFile metrics("runs/demo/metrics.jsonl");
//   metrics.keep_until(120, staging);     // later lines were of steps that are taken again
//   metrics.open();
//   metrics.append(R"({"step":121})");
//
// Lines are whole or not there. Not thread-safe.
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
  // Drops the lines after that step, a torn last line and lines that have none. Error kIo leaves the file as it was.
  void keep_until(int64_t last_step, const std::filesystem::path& staging);
  // For appending. Error kIo.
  void open();
  // `line` without its newline: all of it, or Error kIo (full disk) and the file as before. Needs open().
  void append(std::string_view line);

 private:
  std::filesystem::path path_;
  UniqueFd file_;
};

}  // namespace tessera::train
