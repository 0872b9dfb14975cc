// The stacks of all threads of processes that have run out of time, on standard error (print_stacks_main.cc).
//
//   print_stacks(rank);
//   ::kill(rank, SIGKILL);
//
// Every test program has a limit, too: a little before ctest would kill it without a word (TESSERA_TEST_SECONDS, which
// tests/CMakeLists.txt sets) its own stacks and those of what it has started are printed, and it ends with 99.
#pragma once

#include <sys/types.h>

namespace tessera::testing {

// Of `process` and of all that descend from it. `kills`: those that descend from it are killed afterwards. Returns when
// all is printed, or after a minute. Safe in a signal handler.
void print_stacks(pid_t process, bool kills = false) noexcept;

// Begins the limit that the environment names, as every test program does when it starts.
void begin_test_limit();

// The program that prints them: `print_stacks PROCESS [kill]`.
const char* print_stacks_program() noexcept;

}  // namespace tessera::testing
