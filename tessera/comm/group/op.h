// The operation of a collective or message.
//
//   fmt::format("{} of {} bytes", comm::to_string(comm::Op::kAllReduce), bytes);
//
// No communication. Thread-safe.
#pragma once

#include <cstdint>

#include "tessera/base/enum_name.h"

namespace tessera::comm {

// Signatures in shared memory contain these numbers. New operations are added at the end.
enum class Op : uint8_t {
  kNone,
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kBroadcast,
  kScatter,
  kAllToAll,
  kSend,
  kRecv,
  kBarrier,
  kReduce,
  kGather
};
inline constexpr int kOpCount = static_cast<int>(Op::kGather) + 1;

// Returns a name such as "all_reduce"; error messages begin with it, as in "[comm.all_reduce]".
inline const char* to_string(Op op) noexcept {
  return enum_name(op, {"no call", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "scatter", "all_to_all",
                        "send", "recv", "barrier", "reduce", "gather"});
}
inline bool is_message(Op op) noexcept { return op == Op::kSend || op == Op::kRecv; }
inline bool is_reduction(Op op) noexcept {
  return op == Op::kAllReduce || op == Op::kReduceScatter || op == Op::kReduce;
}

}  // namespace tessera::comm
