// The error of a collective or message that some rank did not join before the timeout.
//
//   catch (const comm::TimedOut& error) { ... }   // some rank is stuck or did not make the call
#pragma once

#include "tessera/base/error.h"

namespace tessera::comm {

class TimedOut final : public Error {
 public:
  explicit TimedOut(const std::string& message) : Error(ErrorKind::kComm, message) {}
};

}  // namespace tessera::comm
