// The function by which a reduction combines the values of the ranks.
//
//   comm::all_reduce(*group, tensor, comm::ReduceOp::kMax).wait();
//
// No communication. Thread-safe.
#pragma once

#include <cstdint>

#include "tessera/base/enum_name.h"

namespace tessera::comm {

enum class ReduceOp : uint8_t { kSum, kAvg, kMin, kMax, kProduct };
// "sum", "avg", "min", "max", "product"
inline const char* to_string(ReduceOp op) noexcept { return enum_name(op, {"sum", "avg", "min", "max", "product"}); }

}  // namespace tessera::comm
