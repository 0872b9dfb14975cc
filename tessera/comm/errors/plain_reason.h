// What a back-end's error says, for messages of ours.
//
//   catch (const std::exception& error) { text = plain_reason(error); }   // "Connection closed by peer [::1]:4711"
#pragma once

#include <exception>
#include <string>

#include "tessera/base/error.h"

namespace tessera::comm {

// Without the source position that libtorch and Gloo put in front, the backtrace and the full stop.
inline std::string plain_reason(const std::exception& error) {
  std::string reason = first_line(error);
  reason = reason.substr(0, reason.find(". This is typically"));
  if (reason.starts_with('[')) {
    const size_t end = reason.find("] ");
    if (end != std::string::npos) reason.erase(0, end + 2);
  }
  while (!reason.empty() && (reason.back() == '.' || reason.back() == ' ')) reason.pop_back();
  return reason;
}

}  // namespace tessera::comm
