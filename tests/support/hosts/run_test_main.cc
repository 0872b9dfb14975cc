// The program that ctest starts for a test: run_test asks the host of the test program to run the test, or becomes the
// test program (test_host.h).
//
//   run_test PROGRAM ARGUMENTS
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>

#include "tests/support/hosts/host_client.h"
#include "tests/support/hosts/test_host.h"
#include "tests/support/hosts/test_request.h"

namespace tessera::testing {
namespace {

[[noreturn]] void become(char** words) {
  ::execv(words[0], words);
  std::perror(words[0]);
  std::_Exit(127);
}

// Ends this process in the same way as the test has ended.
[[noreturn]] void end_as(int status) {
  if (!WIFSIGNALED(status)) std::_Exit(WEXITSTATUS(status));
  ::signal(WTERMSIG(status), SIG_DFL);
  ::raise(WTERMSIG(status));
  std::_Exit(128 + WTERMSIG(status));
}

int run(char** words) {
  const char* folder = std::getenv("TESSERA_TEST_HOSTS");
  if (!folder || !*folder || std::string(words[1] ? words[1] : "").find("list_tests") != std::string::npos) {
    become(words);
  }
  const std::string name = std::string(folder) + "/" + std::filesystem::path(words[0]).filename().string();
  const int socket = reach_host(name, [&] {
    ::setenv(kServeVariable, (name + ".socket").c_str(), 1);
    char* alone[] = {words[0], nullptr};
    become(alone);
  });
  if (socket < 0) become(words);
  Request request{.folder = std::filesystem::current_path().string(), .words = {}, .environment = {}};
  for (char** word = words; *word; ++word) request.words.emplace_back(*word);
  for (char** setting = environ; *setting; ++setting) request.environment.emplace_back(*setting);
  const bool asked = send_request(socket, request);
  if (!asked || receive_bytes(socket, 1) != std::string(1, kStarted)) become(words);  // the host was ending
  int status = 0;
  const std::string end = receive_bytes(socket, sizeof status);
  if (end.size() != sizeof status) {
    std::fprintf(stderr, "run_test: the host of %s has ended\n", words[0]);
    return 98;
  }
  std::memcpy(&status, end.data(), sizeof status);
  end_as(status);
}

}  // namespace
}  // namespace tessera::testing

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fputs("usage: run_test PROGRAM ARGUMENTS\n", stderr);
    return 2;
  }
  return tessera::testing::run(argv + 1);
}
