#include "tessera/train/run_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/base/log.h"
#include "tessera/train/recipe_print.h"

namespace tessera::train {
namespace {

constexpr const char* kLockName = ".lock";
constexpr const char* kMetricsName = "metrics.jsonl";

std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "unknown host";
}

// "pid 71 on host a", as the holder wrote it; any bytes may be there.
std::string holder_of(int lock) {
  char text[300] = {};
  const ssize_t got = ::pread(lock, text, sizeof text - 1, 0);
  std::string holder(text, got > 0 ? static_cast<size_t>(got) : 0);
  holder = holder.substr(0, holder.find('\n'));
  return holder.empty() ? "unknown" : holder;
}

// The step of a metrics line, -1 when it is none.
int64_t step_of(std::string_view line) {
  const auto json = nlohmann::json::parse(line, nullptr, false);
  if (!json.is_object()) return -1;
  const auto step = json.find("step");
  return step != json.end() && step->is_number_integer() ? step->get<int64_t>() : -1;
}

// The lines up to `last_step`, each with its newline.
std::string lines_until(std::string_view text, int64_t last_step) {
  std::string kept;
  while (true) {
    const size_t end = text.find('\n');
    if (end == text.npos) return kept;  // what follows the last newline is a torn line
    const int64_t step = step_of(text.substr(0, end));
    if (step >= 0 && step <= last_step) kept += text.substr(0, end + 1);
    text.remove_prefix(end + 1);
  }
}

}  // namespace

RunFolder::RunFolder(std::filesystem::path path) : path_(std::move(path)) {
  std::error_code error;
  std::filesystem::create_directories(path_, error);
  TESSERA_CHECK(!error && std::filesystem::is_directory(path_), ErrorKind::kIo,
                "[train.run_folder] {}: cannot be made a folder: {}. Choose another checkpoint.dir.", path_.string(),
                error ? error.message() : "a file is in the way");
  const auto lock_path = path_ / kLockName;
  lock_ = ::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  TESSERA_CHECK(lock_ >= 0, ErrorKind::kIo, "[train.run_folder] {}: {}", lock_path.string(), std::strerror(errno));
  if (::flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    const int reason = errno;
    const std::string holder = holder_of(lock_);
    ::close(lock_);
    TESSERA_CHECK(reason != EWOULDBLOCK, ErrorKind::kConfig,
                  "[train.run_folder] {}: another run holds this folder: {}. Wait for it, stop it, or choose another "
                  "checkpoint.dir.",
                  path_.string(), holder);
    raise(ErrorKind::kIo, "[train.run_folder] {}: cannot be locked: {}", lock_path.string(), std::strerror(reason));
  }
  const std::string holder = fmt::format("pid {} on {}\n", ::getpid(), host_name());
  // Only for the other run's message: the lock itself is held already.
  if (::ftruncate(lock_, 0) != 0 || ::pwrite(lock_, holder.data(), holder.size(), 0) < 0) {
    log_warning("[train.run_folder] {}: {}", lock_path.string(), std::strerror(errno));
  }
}

RunFolder::~RunFolder() {
  if (metrics_ >= 0) ::close(metrics_);
  ::close(lock_);  // and with it the lock
}

void RunFolder::write_recipe(const Recipe& recipe) { publish_file(path_ / "recipe.yaml", to_yaml(recipe)); }

void RunFolder::open_metrics(int64_t resumed_step) {
  const auto path = path_ / kMetricsName;
  if (std::filesystem::exists(path)) {
    const std::string before = read_file(path);
    const std::string kept = resumed_step == 0 ? "" : lines_until(before, resumed_step);
    if (kept.size() != before.size()) publish_file(path, kept);
  }
  if (metrics_ >= 0) ::close(metrics_);
  metrics_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  TESSERA_CHECK(metrics_ >= 0, ErrorKind::kIo, "[train.metrics] {}: {}", path.string(), std::strerror(errno));
}

void RunFolder::append(const StepMetrics& metrics) {
  const nlohmann::ordered_json line = {
      {"step", metrics.step},
      {"loss", metrics.loss},
      {"grad_norm", metrics.grad_norm},
      {"lr", metrics.lr},
      {"tokens", metrics.tokens},
      {"tokens_per_second", metrics.tokens_per_second},
      {"memory_bytes", metrics.memory_bytes},
      {"peak_share", metrics.peak_share},
      {"seconds", metrics.seconds},
  };
  append_line(line.dump() + "\n");
}

void RunFolder::append_validation(int64_t step, double validation_loss, double seconds) {
  const nlohmann::ordered_json line = {{"step", step}, {"validation_loss", validation_loss}, {"seconds", seconds}};
  append_line(line.dump() + "\n");
}

void RunFolder::append_line(std::string_view line) {
  TESSERA_CHECK(metrics_ >= 0, ErrorKind::kInternal, "[train.metrics] append before open_metrics()");
  const off_t before = ::lseek(metrics_, 0, SEEK_END);
  const ssize_t written = ::write(metrics_, line.data(), line.size());
  if (written == static_cast<ssize_t>(line.size())) return;
  const std::string reason = written < 0 ? std::strerror(errno) : "no space left";
  if (written > 0 && ::ftruncate(metrics_, before) != 0) {
    log_warning("[train.metrics] {}: holds a torn last line", (path_ / kMetricsName).string());
  }
  raise(ErrorKind::kIo, "[train.metrics] {}: cannot be written: {}. Make room, then start the run again to resume it.",
        (path_ / kMetricsName).string(), reason);
}

}  // namespace tessera::train
