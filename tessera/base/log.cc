#include "tessera/base/log.h"

#include <unistd.h>

#include <atomic>
#include <mutex>

#include "tessera/base/error.h"
#include "tessera/base/warning_log.h"

namespace tessera {
namespace {

std::atomic<LogLevel> current_level{LogLevel::kInfo};
std::mutex prefix_mutex;
std::string& prefix() {
  static std::string value;
  return value;
}

}  // namespace

void set_log_level(LogLevel level) noexcept { current_level = level; }
LogLevel log_level() noexcept { return current_level; }

LogLevel parse_log_level(std::string_view name) {
  if (name == "debug") return LogLevel::kDebug;
  if (name == "info") return LogLevel::kInfo;
  if (name == "warning") return LogLevel::kWarning;
  if (name == "error") return LogLevel::kError;
  if (name == "off") return LogLevel::kOff;
  raise(ErrorKind::kConfig, "[cli] --log-level '{}': expected debug, info, warning, error or off", name);
}

void set_log_prefix(std::string value) {
  const std::lock_guard lock(prefix_mutex);
  prefix() = std::move(value);
}

// One write() for each line, so lines of several threads and processes are not mixed.
void log_line(LogLevel level, std::string_view message) {
  const char* label = level == LogLevel::kWarning ? "warning: " : level == LogLevel::kError ? "error: " : "";
  std::string line;
  {
    const std::lock_guard lock(prefix_mutex);
    line = fmt::format("[tessera] {}{}{}\n", prefix(), label, message);
  }
  // A failed write to stderr cannot be reported anywhere.
  [[maybe_unused]] const auto ignored = ::write(STDERR_FILENO, line.data(), line.size());
  if (level == LogLevel::kWarning) WarningLog::notify(message);
}

}  // namespace tessera
