// What a launcher hears while it waits. Internal to comm.
//
//   Signals signals;                       // SIGCHLD, SIGINT, SIGTERM, ... arrive here while it lives
//   signals.wait(milliseconds(500));
//   while (const auto info = signals.next()) ...
//
// For a process with one thread.
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

// By this process, as nohup leaves SIGHUP: then nobody is to end by it.
bool is_ignored(int signal);

class Signals {
 public:
  Signals();  // Error kIo
  ~Signals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  // Until there is one, or `other` (-1: nothing) can be read, or the time is over.
  void wait(std::chrono::milliseconds at_most, int other = -1) const {
    pollfd polled[] = {{descriptor_.get(), POLLIN, 0}, {other, POLLIN, 0}};
    ::poll(polled, 2, static_cast<int>(at_most.count()));
  }
  std::optional<signalfd_siginfo> next() const {
    signalfd_siginfo info;
    if (::read(descriptor_.get(), &info, sizeof info) != sizeof info) return std::nullopt;
    return info;
  }

 private:
  sigset_t set_, before_;
  UniqueFd descriptor_;
};

// Reads what has come: whether somebody wants the run to end.
bool asked_to_stop(const Signals& signals);

// Orphans of our ranks become our children.
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
