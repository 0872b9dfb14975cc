// Tests of StopSignals: the first signal requests a stop, and a second signal ends the process.
#include "tessera/train/run/stop_signals.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace tessera::train {
namespace {

// The exit code of a process under StopSignals. The process gets `terms_of_parent` SIGTERM from its parent, then sends
// itself `own_terms` SIGTERM and `own_usr1s` SIGUSR1. The result is 0 if all signals were one request.
int exit_code_after(int terms_of_parent, int own_terms, int own_usr1s) {
  int told[2], ready[2];
  if (::pipe(told) != 0 || ::pipe(ready) != 0) return -1;
  const pid_t child = ::fork();
  if (child == 0) {
    char byte = 0;
    const StopSignals signals;
    if (StopSignals::requested() || ::write(ready[1], "r", 1) != 1) ::_exit(9);
    while (::read(told[0], &byte, 1) < 0) {
    }
    for (int i = 0; i < own_terms; ++i) ::kill(::getpid(), SIGTERM);
    for (int i = 0; i < own_usr1s; ++i) ::kill(::getpid(), SIGUSR1);
    ::_exit(StopSignals::requested() ? 0 : 8);
  }
  char byte = 0;
  EXPECT_EQ(::read(ready[0], &byte, 1), 1);
  for (int i = 0; i < terms_of_parent; ++i) {
    ::kill(child, SIGTERM);
    ::usleep(50'000);  // the kernel merges two pending signals of the same number
  }
  EXPECT_EQ(::write(told[1], "t", 1), 1);
  int status = 0;
  ::waitpid(child, &status, 0);
  for (const int end : {told[0], told[1], ready[0], ready[1]}) ::close(end);
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

TEST(StopSignals, FirstRequestsAStopAndSecondEndsTheProcess) {
  EXPECT_EQ(exit_code_after(0, 1, 0), 0);
  EXPECT_EQ(exit_code_after(1, 0, 0), 0);
  EXPECT_EQ(exit_code_after(0, 2, 0), 128 + SIGTERM) << "however soon it comes";
  EXPECT_EQ(exit_code_after(2, 0, 0), 128 + SIGTERM);
  EXPECT_EQ(exit_code_after(0, 1, 1), 128 + SIGUSR1);
}

TEST(StopSignals, LaunchersSignalAndAnotherCountAsOne) {
  EXPECT_EQ(exit_code_after(1, 1, 0), 0);
  EXPECT_EQ(exit_code_after(1, 1, 1), 128 + SIGUSR1);
}

TEST(StopSignals, EarlierHandlersAreRestored) {
  const auto handler = +[](int) {};
  const auto before = ::signal(SIGTERM, handler);
  { const StopSignals signals; }
  EXPECT_EQ(::signal(SIGTERM, before), handler);
}

}  // namespace
}  // namespace tessera::train
