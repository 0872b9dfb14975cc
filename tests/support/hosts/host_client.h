// Access to a host, a process that serves several tests; the first of these tests starts it. NAME.socket is the host's
// listening socket, NAME.pid has its process id, NAME.log has its output, and NAME.lock is held while a test starts the
// host.
#pragma once

#include <functional>
#include <string>

namespace tessera::testing {

// Returns a connection with the host `name`, or -1 if there is none. If the host does not run, the function starts it:
// `become` is called in a process with its own session, because the end of this test must not end the host of other
// tests. `become` must not return.
int reach_host(const std::string& name, const std::function<void()>& become);

}  // namespace tessera::testing
