// Logging to stderr, one line a message: "[tessera] rank 1: message". Results go to stdout, never through here.
//
//   log_info("[models.load] {} tensors from {}", n, dir);
//
// Thread-safe: a line is written by one write(2).
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>

namespace tessera {

enum class LogLevel { kDebug, kInfo, kWarning, kError, kOff };

void set_log_level(LogLevel level) noexcept;
LogLevel log_level() noexcept;
// The level of a name: "debug", "info", "warning", "error" or "off". Error kConfig for any other name.
LogLevel parse_log_level(std::string_view name);
// Sets the text before each message of this process, e.g. "rank 1: ". Empty by default.
void set_log_prefix(std::string prefix);
void log_line(LogLevel level, std::string_view message);

template <class... Args>
void log_debug(fmt::format_string<Args...> format, Args&&... args) {
  if (log_level() <= LogLevel::kDebug) log_line(LogLevel::kDebug, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) {
  if (log_level() <= LogLevel::kInfo) log_line(LogLevel::kInfo, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void log_warning(fmt::format_string<Args...> format, Args&&... args) {
  if (log_level() <= LogLevel::kWarning) log_line(LogLevel::kWarning, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void log_error(fmt::format_string<Args...> format, Args&&... args) {
  if (log_level() <= LogLevel::kError) log_line(LogLevel::kError, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace tessera
