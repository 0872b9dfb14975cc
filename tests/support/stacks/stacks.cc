// Starts print_stacks from a process, also from a signal handler (stacks.h).
#include "tests/support/stacks/stacks.h"

#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>

extern "C" char** environ;

namespace tessera::testing {
namespace {

constexpr const char* kProgram = TESSERA_PRINT_STACKS;

// Writes `number` into `text`, which must have enough room.
void decimal(char* text, unsigned number) {
  char digits[16];
  size_t count = 0;
  do {
    digits[count++] = static_cast<char>('0' + number % 10);
    number /= 10;
  } while (number != 0);
  while (count > 0) *text++ = digits[--count];
  *text = '\0';
}

}  // namespace

const char* print_stacks_program() noexcept { return kProgram; }

void print_stacks(pid_t process, bool kills) noexcept {
  const int before = errno;
  char number[16], name[] = "print_stacks", word[] = "kill";
  decimal(number, static_cast<unsigned>(process));
  char* arguments[] = {name, number, kills ? word : nullptr, nullptr};
  // fork() would take locks, which the interrupted thread may hold.
  const auto child = static_cast<pid_t>(::syscall(SYS_clone, SIGCHLD, nullptr, nullptr, nullptr, nullptr));
  if (child == 0) {
    ::dup2(2, 1);
    ::execve(kProgram, arguments, environ);
    ::syscall(SYS_exit_group, 127);
  }
  constexpr int kTurns = 600;
  for (int turn = 0; child > 0 && turn < kTurns && ::waitpid(child, nullptr, WNOHANG) == 0; ++turn) {
    const timespec turn_length{0, 100'000'000};
    ::nanosleep(&turn_length, nullptr);
  }
  errno = before;
}

}  // namespace tessera::testing
