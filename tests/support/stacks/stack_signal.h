// What a process that is asked for its stacks and the one that asks agree upon.
//
// The one that asks sends stack_signal() to each thread of a process. The thread's handler (stack_writer.cc) writes the
// addresses of its frames, innermost first and a line each, into stack_path(), and kLastLine behind them.
#pragma once

#include <csignal>
#include <cstdio>

namespace tessera::testing {

inline int stack_signal() { return SIGRTMIN + 11; }

inline constexpr const char* kLastLine = "end\n";

// In `path`, of `size` bytes. `asker`: the process that has sent the signal.
inline void stack_path(char* path, size_t size, int asker, int thread) {
  std::snprintf(path, size, "/tmp/tessera-stack-%d-%d", asker, thread);
}

}  // namespace tessera::testing
