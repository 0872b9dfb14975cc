// The time limit of a test program (stacks.h). Linked into every test program, because gtest's main() has no such
// limit.
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "tests/support/sanitized.h"
#include "tests/support/stacks/stacks.h"

namespace tessera::testing {
namespace {

void end_program(int) {
  constexpr char kText[] = "this test is about to run out of its time; the stacks of its processes:\n";
  [[maybe_unused]] const ssize_t written = ::write(2, kText, std::strlen(kText));
  print_stacks(::getpid(), /*kills=*/true);
  ::_exit(99);
}

// Programs that this program starts get the handler for stacks, too.
void preload_in_children() {
  const char* before = std::getenv("LD_PRELOAD");
  const std::string all = before ? std::string(before) : std::string();
  if (all.find(TESSERA_STACK_WRITER) != all.npos) return;
  ::setenv("LD_PRELOAD", (all.empty() ? TESSERA_STACK_WRITER : all + ":" + TESSERA_STACK_WRITER).c_str(), 1);
}

}  // namespace

// A fork inherits no alarm, and a program that is started has none without the variable.
void begin_test_limit() {
  if (!kSanitized) preload_in_children();  // sanitizers must be loaded first
  const char* text = std::getenv("TESSERA_TEST_SECONDS");
  if (!text) return;
  const int seconds = std::atoi(text);
  ::unsetenv("TESSERA_TEST_SECONDS");
  constexpr int kToPrint = 20;
  if (seconds <= kToPrint) return;
  struct sigaction ending {};
  ending.sa_handler = end_program;
  ::sigaction(SIGALRM, &ending, nullptr);
  ::alarm(static_cast<unsigned>(seconds - kToPrint));
}

namespace {

__attribute__((constructor)) void begin_limit() { begin_test_limit(); }

}  // namespace
}  // namespace tessera::testing
