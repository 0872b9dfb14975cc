#include "tessera/comm/group/op.h"

namespace tessera::comm {

const char* to_string(Op op) noexcept {
  switch (op) {
    case Op::kNone:
      return "no call";
    case Op::kAllReduce:
      return "all_reduce";
    case Op::kAllGather:
      return "all_gather";
    case Op::kReduceScatter:
      return "reduce_scatter";
    case Op::kBroadcast:
      return "broadcast";
    case Op::kScatter:
      return "scatter";
    case Op::kAllToAll:
      return "all_to_all";
    case Op::kSend:
      return "send";
    case Op::kRecv:
      return "recv";
    case Op::kBarrier:
      return "barrier";
    case Op::kReduce:
      return "reduce";
    case Op::kGather:
      return "gather";
  }
  return "?";
}

}  // namespace tessera::comm
