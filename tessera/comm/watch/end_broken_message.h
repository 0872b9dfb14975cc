// Ends the wait for a message whose connection is broken. Internal to comm.
//
// When a connection ends, Gloo wakes the waits on it, except for a message that was being written or read at that
// moment: such a message is in none of the lists that Pair::signalException() (tcp/pair.cc) goes through. Its wait
// would last until the group's timeout.
#pragma once

#include <exception>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace tessera::comm {

// Makes the current wait for `work`, or the next one, return at once. Only for messages of CPU tensors: abort() of a
// device's work would abort its whole communicator. Thread-safe.
inline void end_broken_message(c10d::Work& work) noexcept {
  try {
    work.abort();
  } catch (const std::exception&) {  // the back-end's works have no abort(), and their waits do not hang
  }
}

}  // namespace tessera::comm
