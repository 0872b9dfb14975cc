#include "tessera/train/run/stop_signals.h"

#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <iterator>

namespace tessera::train {
namespace {

constexpr int64_t kSameRequestMs = 1000;  // window in which signals of two senders are one request
enum Sender : unsigned { kParent = 1, kOther = 2 };

std::atomic<int64_t> first_signal_ms{0};  // CLOCK_MONOTONIC at the first signal; 0: no signal yet
std::atomic<unsigned> senders{0};         // bits of Sender: who has sent a signal so far

// Calls only async-signal-safe functions and lock-free atomics. There are two senders: the parent process, and everyone
// else. The first signal only sets the request. So does the first signal of the other sender if it arrives within
// kSameRequestMs of the first signal. Any further signal is raised again with the default action, which ends the
// process.
void on_signal(int signal, siginfo_t* info, void*) {
  struct timespec now {};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t now_ms = now.tv_sec * 1000 + now.tv_nsec / 1'000'000;
  const bool sent = info->si_code <= 0;  // sent by a process (kill), so si_pid is valid
  const unsigned sender = sent && info->si_pid == ::getppid() ? kParent : kOther;
  const bool again = (senders.fetch_or(sender) & sender) != 0;
  int64_t first_ms = 0;
  if (first_signal_ms.compare_exchange_strong(first_ms, now_ms) || (!again && now_ms - first_ms <= kSameRequestMs)) {
    return;
  }
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

constexpr int kSignals[] = {SIGTERM, SIGUSR1};

}  // namespace

StopSignals::StopSignals() {
  first_signal_ms = 0;
  senders = 0;
  struct sigaction action {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO;
  for (size_t i = 0; i < std::size(kSignals); ++i) ::sigaction(kSignals[i], &action, &before_[i]);
}

StopSignals::~StopSignals() {
  for (size_t i = 0; i < std::size(kSignals); ++i) ::sigaction(kSignals[i], &before_[i], nullptr);
}

bool StopSignals::requested() { return first_signal_ms != 0; }

}  // namespace tessera::train
