#include "tessera/comm/launch/launch_signals.h"

#include <cerrno>
#include <cstring>

#include "tessera/base/error.h"

namespace tessera::comm {

Signals::Signals() {
  ::sigemptyset(&set_);
  for (const int signal : {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2}) ::sigaddset(&set_, signal);
  ::pthread_sigmask(SIG_BLOCK, &set_, &before_);
  descriptor_.reset(::signalfd(-1, &set_, SFD_CLOEXEC | SFD_NONBLOCK));
  TESSERA_CHECK(descriptor_.open(), ErrorKind::kIo, "[launch] signalfd: {}", std::strerror(errno));
}

}  // namespace tessera::comm
