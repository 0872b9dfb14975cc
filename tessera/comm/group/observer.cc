#include "tessera/comm/group/observer.h"

namespace tessera::comm {

namespace {
const ContextKey kObserver{"observer of collectives"};
}

CollectiveObserver::CollectiveObserver() : in_force_(kObserver, this) {}

// Almost all collectives run without an observer. For these, notify() costs only the thread-local lookup of
// innermost().
void CollectiveObserver::notify(Op op, int64_t bytes, const Group& group) {
  if (ContextValue::innermost(kObserver) != nullptr) {
    ContextValue::for_each(kObserver, [&](void* observer) {
      static_cast<CollectiveObserver*>(observer)->on_collective(op, bytes, group);
    });
  }
}

}  // namespace tessera::comm
