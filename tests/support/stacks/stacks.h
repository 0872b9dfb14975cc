// Prints the stacks of all threads of processes that have exceeded their time, to standard error
// (print_stacks_main.cc).
//
//   print_stacks(rank);
//   ::kill(rank, SIGKILL);
//
// Every test program has a limit, too (TESSERA_TEST_SECONDS, which tests/CMakeLists.txt sets). Shortly before ctest
// would kill the program without a message, the stacks of the program and of its children are printed, and the program
// ends with 99.
#pragma once

#include <sys/types.h>

namespace tessera::testing {

// Prints the stacks of `process` and of its descendants. With `kills` the descendants are killed afterwards. Returns
// when all stacks are printed, or after a minute. Safe in a signal handler.
void print_stacks(pid_t process, bool kills = false) noexcept;

// Starts the limit that the environment names. Every test program calls this at its start.
void begin_test_limit();

// Path of the program that prints the stacks: `print_stacks PROCESS [kill]`.
const char* print_stacks_program() noexcept;

}  // namespace tessera::testing
