// The reason in a back-end's error, for use inside Tessera's own messages.
//
//   catch (const std::exception& error) { text = plain_reason(error); }   // "Connection closed by peer [::1]:4711"
#pragma once

#include <exception>
#include <string>

#include "tessera/base/error.h"

namespace tessera::comm {

// Returns the first line of the message without the source position that libtorch and Gloo put in front, without Gloo's
// general advice, and without the full stop.
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
