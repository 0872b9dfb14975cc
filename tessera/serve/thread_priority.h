// The priority of threads that read large requests.
#pragma once

#include <sys/resource.h>
#include <unistd.h>

namespace tessera::serve {

// From here on the calling thread gets about a seventieth of the time that a thread of the model gets where both want a
// core. For a thread of a connection that has much to read or to prepare: on a machine of few cores clients that send
// large requests one after another would hold up the answers of all others. It stays so, since the system lets no
// thread raise its priority again.
inline void step_behind_the_model() {
  constexpr int kNice = 19;
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), kNice);
}

}  // namespace tessera::serve
