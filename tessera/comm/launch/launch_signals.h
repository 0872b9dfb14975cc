// The signals that a launcher receives while it waits. Internal to comm.
//
//   SignalQueue signals;                   // while it lives, SIGCHLD, SIGINT, SIGTERM, ... are queued here
//   signals.wait(milliseconds(500));
//   while (const auto info = signals.next()) ...
//
// Only for a process with one thread.
#pragma once

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <chrono>
#include <optional>

#include "tessera/base/files/unique_fd.h"

namespace tessera::comm {

// Whether this process ignores the signal, as under nohup for SIGHUP. Then the ranks ignore it, too.
bool is_ignored(int signal);

class SignalQueue {
 public:
  SignalQueue();  // Error kIo
  ~SignalQueue() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalQueue(const SignalQueue&) = delete;
  SignalQueue& operator=(const SignalQueue&) = delete;

  // Waits until a signal has arrived, the descriptor `other` (-1: none) is readable, or the time is over.
  void wait(std::chrono::milliseconds timeout, int other = -1) const {
    pollfd polled[] = {{descriptor_.get(), POLLIN, 0}, {other, POLLIN, 0}};
    ::poll(polled, 2, static_cast<int>(timeout.count()));
  }
  // Returns the next queued signal, nullopt when there is none. Does not block.
  std::optional<signalfd_siginfo> next() const {
    signalfd_siginfo info;
    if (::read(descriptor_.get(), &info, sizeof info) != sizeof info) return std::nullopt;
    return info;
  }

 private:
  sigset_t set_, before_;
  UniqueFd descriptor_;
};

// Reads the queued signals; returns true when SIGINT, SIGTERM, SIGHUP or SIGUSR1 is among them.
bool asked_to_stop(const SignalQueue& signals);

// Makes this process a child subreaper (prctl(2)) while the Subreaper object exists: orphaned descendants of the ranks
// become children of this process.
class Subreaper {
 public:
  Subreaper() {
    ::prctl(PR_GET_CHILD_SUBREAPER, &before_);
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  }
  ~Subreaper() { ::prctl(PR_SET_CHILD_SUBREAPER, before_); }
  Subreaper(const Subreaper&) = delete;
  Subreaper& operator=(const Subreaper&) = delete;

 private:
  int before_ = 0;
};

}  // namespace tessera::comm
