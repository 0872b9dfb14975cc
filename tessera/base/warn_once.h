// Warnings that this process tells once, whatever repeats their cause.
//
//   log_warning_once("[models.load] {}: {} is not used", dir, name);
//
// Thread-safe. Of more than 1,000 different ones the later ones are not told.
#pragma once

#include <string_view>
#include <utility>

#include "tessera/base/log.h"

namespace tessera {

// Whether this process asks for the first time with this message.
bool is_first_time(std::string_view message);

template <class... Args>
void log_warning_once(fmt::format_string<Args...> format, Args&&... args) {
  const auto message = fmt::format(format, std::forward<Args>(args)...);
  if (log_level() <= LogLevel::kWarning && is_first_time(message)) log_line(LogLevel::kWarning, message);
}

}  // namespace tessera
