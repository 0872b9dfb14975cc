#include "tessera/comm/group/observer.h"

namespace tessera::comm {

namespace {
const PropagatedKind kObserver{"observer of collectives"};
}

const char* to_string(CommKind kind) noexcept {
  switch (kind) {
    case CommKind::kAllGather:
      return "all_gather";
    case CommKind::kAllReduce:
      return "all_reduce";
    case CommKind::kReduceScatter:
      return "reduce_scatter";
    case CommKind::kAllToAll:
      return "all_to_all";
    case CommKind::kBroadcast:
      return "broadcast";
    case CommKind::kScatter:
      return "scatter";
    case CommKind::kSend:
      return "send";
    case CommKind::kRecv:
      return "recv";
    case CommKind::kCount:
      break;
  }
  return "?";
}

CollectiveObserver::CollectiveObserver() : in_force_(kObserver, this) {}

void CollectiveObserver::notify(CommKind kind, int64_t bytes, const Group& group) {
  if (Propagated::innermost(kObserver) != nullptr) {
    Propagated::for_each(kObserver, [&](void* observer) {
      static_cast<CollectiveObserver*>(observer)->on_collective(kind, bytes, group);
    });
  }
}

}  // namespace tessera::comm
