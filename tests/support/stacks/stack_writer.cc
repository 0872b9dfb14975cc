// The signal handler that writes the stacks of this process (stack_signal.h). This file is linked into every test
// program, and is also a library that test programs preload into the programs that they start.
//
// The handler calls no function that takes a lock, because the interrupted thread may hold any lock. backtrace() takes
// no lock once libgcc_s is loaded; a constructor calls backtrace() for this purpose. A program without libgcc_s, or one
// that uses the signal itself, gets no handler.
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "tests/support/stacks/stack_signal.h"

namespace tessera::testing {
namespace {

constexpr int kMostFrames = 128;

void write_address(int file, uintptr_t address) {
  char line[2 + 2 * sizeof address] = {};
  size_t begin = sizeof line - 1;
  line[begin] = '\n';
  do {
    line[--begin] = "0123456789abcdef"[address % 16];
    address /= 16;
  } while (address != 0);
  [[maybe_unused]] const ssize_t written = ::write(file, line + begin, sizeof line - begin);
}

void write_stack(int, siginfo_t* info, void*) {
  const int before = errno;
  char path[64];
  stack_path(path, sizeof path, info->si_pid, static_cast<int>(::syscall(SYS_gettid)));
  const int file = ::open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file >= 0) {
    void* frames[kMostFrames];
    const int count = ::backtrace(frames, kMostFrames);
    for (int i = 0; i < count; ++i) write_address(file, reinterpret_cast<uintptr_t>(frames[i]));
    [[maybe_unused]] const ssize_t written = ::write(file, kLastLine, std::strlen(kLastLine));
    ::close(file);
    const timespec moment{0,
                          500'000'000};  // time to ask the other threads: calls that are interrupted may end a thread
    ::nanosleep(&moment, nullptr);
  }
  errno = before;
}

__attribute__((constructor)) void answer_for_stacks() {
  if (::dlopen("libgcc_s.so.1", RTLD_NOW | RTLD_NOLOAD) == nullptr) return;
  void* frames[2];
  ::backtrace(frames, 2);  // loads the libraries that it needs
  struct sigaction now {};
  if (::sigaction(stack_signal(), nullptr, &now) != 0 || now.sa_handler != SIG_DFL) return;
  struct sigaction answering {};
  answering.sa_sigaction = write_stack;
  answering.sa_flags = SA_SIGINFO | SA_RESTART;
  ::sigaction(stack_signal(), &answering, nullptr);
}

}  // namespace
}  // namespace tessera::testing
