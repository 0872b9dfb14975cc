#include "tessera/comm/group/observer.h"

namespace tessera::comm {

namespace {
thread_local CollectiveObserver* innermost = nullptr;
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

CollectiveObserver::CollectiveObserver() : outer_(innermost) { innermost = this; }

CollectiveObserver::~CollectiveObserver() { innermost = outer_; }

void CollectiveObserver::notify(CommKind kind, int64_t bytes, const Group& group) {
  for (CollectiveObserver* observer = innermost; observer != nullptr; observer = observer->outer_) {
    observer->on_collective(kind, bytes, group);
  }
}

}  // namespace tessera::comm
