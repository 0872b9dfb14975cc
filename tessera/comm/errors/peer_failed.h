// The error of a rank that fails because another one did: never the cause, so launchers report the other one's.
//
//   catch (const comm::PeerFailed& error) { ... }   // look for the cause elsewhere
#pragma once

#include "tessera/base/error.h"

namespace tessera::comm {

class PeerFailed final : public Error {
 public:
  explicit PeerFailed(const std::string& message) : Error(ErrorKind::kComm, message) {}
};

}  // namespace tessera::comm
