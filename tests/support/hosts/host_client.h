// Reaching a process that serves several tests, which the first of them starts: NAME.socket is where it listens,
// NAME.pid tells who it is, NAME.log has what it says, and NAME.lock is held by who starts it.
#pragma once

#include <functional>
#include <string>

namespace tessera::testing {

// A connection with the host `name`, whom it starts where there is none: `become` is called in a process of a session
// of its own, since what ends this test is not to end the host of others, and must not return. -1: there is none to be
// had.
int reach_host(const std::string& name, const std::function<void()>& become);

}  // namespace tessera::testing
