// What a collective or message does.
//
//   fmt::format("{} of {} bytes", comm::to_string(comm::Op::kAllReduce), bytes);
//
// No communication. Thread-safe.
#pragma once

#include <cstdint>

#include "tessera/base/enum_name.h"

namespace tessera::comm {

// The numbers are in flight records and in the memory that ranks share: new ones go to the end.
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

// "all_reduce", ...; the verb of the error messages
inline const char* to_string(Op op) noexcept {
  return enum_name(op, {"no call", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "scatter", "all_to_all",
                        "send", "recv", "barrier", "reduce", "gather"});
}
inline bool is_message(Op op) noexcept { return op == Op::kSend || op == Op::kRecv; }
inline bool is_reduction(Op op) noexcept {
  return op == Op::kAllReduce || op == Op::kReduceScatter || op == Op::kReduce;
}

}  // namespace tessera::comm
