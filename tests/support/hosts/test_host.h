// Test programs that load only once. If TESSERA_TEST_HOSTS (set by `./dev test`) names a folder, the tests of ctest are
// forks of a host: the test program itself, which has loaded libtorch and waits for requests. Each test is still a
// separate process, with its own environment, streams, limit and end. The first test of a program starts the host; the
// host ends when it has no requests for a while. Without the variable a test program runs in the usual way.
//
//   run_test PROGRAM ARGUMENTS             // of ctest (run_test_main.cc): asks the host of PROGRAM, or becomes PROGRAM
//   if (auto words = serve_tests()) ...    // in main() (test_main.cc): the words of a test, in its fork
//
// A connection carries one test. The client sends a Request with its three standard streams. The host answers with
// kStarted once the fork exists, and with the fork's wait status at its end. If the client goes away, the fork and all
// processes of its process group are killed.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace tessera::testing {

// Names the socket at which a test program serves.
inline constexpr const char* kServeVariable = "TESSERA_TEST_SERVE";
inline constexpr char kStarted = 'S';

// Returns nothing if kServeVariable is not set. Otherwise the function serves requests and returns in each test's fork,
// with the arguments of the test's command line; in the host itself it never returns.
std::optional<std::vector<std::string>> serve_tests();

}  // namespace tessera::testing
