// Test programs that load once: with TESSERA_TEST_HOSTS, a folder, in the environment (`./dev test` sets it), ctest's
// tests are forks of a host, the test program itself, which has loaded libtorch and waits. Each test still is a process
// of its own, with its own environment, streams, limit and end; the first test of a program starts the host, which ends
// when nothing was asked of it for a while. Without the variable a test program runs as any other.
//
//   run_test PROGRAM ARGUMENTS             // of ctest (run_test_main.cc): asks the host of PROGRAM, or becomes PROGRAM
//   if (auto words = serve_tests()) ...    // in main() (test_main.cc): the words of a test, in its fork
//
// A connection carries one test: the client sends a Request with its three standard streams; the host answers with
// kStarted once the fork is there, and with the fork's wait status at its end. A client that goes away takes its fork,
// and all of the fork's process group, with it.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace tessera::testing {

// Names the socket at which a test program is to serve.
inline constexpr const char* kServeVariable = "TESSERA_TEST_SERVE";
inline constexpr char kStarted = 'S';

// Where kServeVariable is not set: nothing. Else it serves, and returns in each test's fork with the words of that
// test's command line; the host itself never returns.
std::optional<std::vector<std::string>> serve_tests();

}  // namespace tessera::testing
