// Warnings that are logged once in a process, even if their cause repeats.
//
//   log_warning_once("[models.load] {}: {} is not used", dir, name);
//
// Thread-safe. After 1,000 different warnings no more warnings are logged.
#pragma once

#include <string_view>
#include <utility>

#include "tessera/base/log.h"

namespace tessera {

// Whether this is the first call with this message in the process. False after 1,000 different messages.
bool is_first_time(std::string_view message);

template <class... Args>
void log_warning_once(fmt::format_string<Args...> format, Args&&... args) {
  const auto message = fmt::format(format, std::forward<Args>(args)...);
  if (log_level() <= LogLevel::kWarning && is_first_time(message)) log_line(LogLevel::kWarning, message);
}

}  // namespace tessera
