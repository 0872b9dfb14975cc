// Ends the wait for a message whose connection is broken. Internal to comm.
//
// Gloo wakes the waits of a connection that has ended, but for those of messages whose bytes were on their way then:
// what a pair is writing or reading is in none of the lists that its signalException() goes through (tcp/pair.cc). Such
// a wait would stand until the time-out of the group.
#pragma once

#include <exception>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace tessera::comm {

// The wait under way, or the next one, returns at once. For messages of the host alone: the abort() of a device's work
// is that of its communicator. Thread-safe.
inline void end_message(c10d::Work& work) noexcept {
  try {
    work.abort();
  } catch (const std::exception&) {  // a back-end without such waits
  }
}

}  // namespace tessera::comm
