// The protocol between a process whose stacks are requested and the process that requests them.
//
// The requesting process sends stack_signal() to each thread of a process. The thread's handler (stack_writer.cc)
// writes the addresses of its frames into stack_path(), innermost first and one per line, then kLastLine.
#pragma once

#include <csignal>
#include <cstdio>

namespace tessera::testing {

inline int stack_signal() { return SIGRTMIN + 11; }

inline constexpr const char* kLastLine = "end\n";

// Writes the path into `path`, which has `size` bytes. `asker` is the process that has sent the signal.
inline void stack_path(char* path, size_t size, int asker, int thread) {
  std::snprintf(path, size, "/tmp/tessera-stack-%d-%d", asker, thread);
}

}  // namespace tessera::testing
