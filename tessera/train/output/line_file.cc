#include "tessera/train/output/line_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/files/staged.h"
#include "tessera/base/log.h"
#include "tessera/base/text/json.h"

namespace tessera::train {
namespace {

// The step of a line; -1 if the line is no JSON object or has no step.
int64_t step_of(std::string_view line) {
  constexpr JsonLimits kLineLimits{.max_bytes = size_t{1} << 20, .max_depth = 8, .max_keys = 10'000};
  try {
    const Json json = parse_json_object(line, "line", kLineLimits);
    return JsonReader(json, "line").integer("step", -1, 0, INT64_MAX);
  } catch (const Error&) {
    return -1;
  }
}

// The lines up to `last_step`, each with its newline.
std::string lines_until(std::string_view text, int64_t last_step) {
  std::string kept;
  while (true) {
    const size_t end = text.find('\n');
    if (end == text.npos) return kept;  // text after the last newline is an incomplete line
    const int64_t step = step_of(text.substr(0, end));
    if (step >= 0 && step <= last_step) kept += text.substr(0, end + 1);
    text.remove_prefix(end + 1);
  }
}

}  // namespace

void LineFile::keep_until(int64_t last_step, const std::filesystem::path& staging) {
  if (!std::filesystem::exists(path_)) return;
  // The shortened file is published by rename; a reader sees the old or the new file. Nothing is written if all lines
  // are kept.
  const std::string before = read_file(path_);
  if (const auto kept = lines_until(before, last_step); kept.size() != before.size()) {
    publish_file(path_, kept, staging);
  }
}

void LineFile::open() {
  file_.reset(::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  TESSERA_CHECK(file_.open(), ErrorKind::kIo, "[train.metrics] {}: {}", path_.string(), std::strerror(errno));
}

// Writes the line with one write(2), so that no other writer can interleave. After a partial write (full disk) the file
// is truncated to its previous length.
void LineFile::append(std::string_view line) {
  TESSERA_CHECK(file_.open(), ErrorKind::kInternal, "[train.metrics] append before open()");
  const std::string whole = std::string(line) + "\n";
  const off_t before = ::lseek(file_.get(), 0, SEEK_END);
  const ssize_t written = ::write(file_.get(), whole.data(), whole.size());
  if (written == static_cast<ssize_t>(whole.size())) return;
  const std::string reason = written < 0 ? std::strerror(errno) : "no space left";
  if (written > 0 && ::ftruncate(file_.get(), before) != 0) {
    log_warning("[train.metrics] {}: holds a torn last line", path_.string());
  }
  raise(ErrorKind::kIo, "[train.metrics] {}: cannot be written: {}. Make room, then start the run again to resume it.",
        path_.string(), reason);
}

}  // namespace tessera::train
