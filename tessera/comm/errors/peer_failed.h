// The error of a rank that fails because another rank failed. It is never the first error of a run, so launchers report
// the other rank's error instead.
//
//   catch (const comm::PeerFailed& error) { ... }   // the cause is another rank's error
#pragma once

#include "tessera/base/error.h"

namespace tessera::comm {

class PeerFailed final : public Error {
 public:
  explicit PeerFailed(const std::string& message) : Error(ErrorKind::kComm, message) {}
};

}  // namespace tessera::comm
