// Lowers the priority of threads that process large requests.
#pragma once

#include <sys/resource.h>
#include <unistd.h>

namespace tessera::serve {

// Gives the calling thread the lowest priority (nice 19). When it competes for a core with a thread of the model, it
// gets about a seventieth of the time. The thread of a connection calls this function before it reads a large body or
// builds a grammar: on a machine with few cores, clients that send large requests one after another would otherwise
// delay all other answers. The thread cannot undo it, because Linux does not let an unprivileged thread raise its
// priority.
inline void lower_thread_priority() {
  constexpr int kNice = 19;
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), kNice);
}

}  // namespace tessera::serve
