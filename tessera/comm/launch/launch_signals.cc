#include "tessera/comm/launch/launch_signals.h"

#include <cerrno>
#include <cstring>

#include "tessera/base/error.h"

namespace tessera::comm {

bool is_ignored(int signal) {
  struct sigaction action {};
  return ::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

// The signals are blocked and then read from a signalfd, so that the launcher handles them in its loop and not in a
// handler. A SIGHUP that is ignored (nohup) is not among the blocked signals: a signalfd would report it although it is
// ignored.
SignalQueue::SignalQueue() {
  ::sigemptyset(&set_);
  for (const int signal : {SIGCHLD, SIGINT, SIGTERM, SIGUSR1, SIGUSR2}) ::sigaddset(&set_, signal);
  if (!is_ignored(SIGHUP)) ::sigaddset(&set_, SIGHUP);
  ::pthread_sigmask(SIG_BLOCK, &set_, &before_);
  descriptor_.reset(::signalfd(-1, &set_, SFD_CLOEXEC | SFD_NONBLOCK));
  TESSERA_CHECK(descriptor_.open(), ErrorKind::kIo, "[launch] signalfd: {}", std::strerror(errno));
}

bool asked_to_stop(const SignalQueue& signals) {
  while (const auto info = signals.next()) {
    const auto signal = info->ssi_signo;
    if (signal == SIGINT || signal == SIGTERM || signal == SIGHUP || signal == SIGUSR1) return true;
  }
  return false;
}

}  // namespace tessera::comm
