// How a reduction combines the ranks' values.
//
//   comm::all_reduce(*group, tensor, comm::ReduceOp::kMax).wait();
//
// No communication. Thread-safe.
#pragma once

#include <cstdint>

namespace tessera::comm {

enum class ReduceOp : uint8_t { kSum, kAvg, kMin, kMax, kProduct };
const char* to_string(ReduceOp op) noexcept;  // "sum", "avg", "min", "max", "product"

}  // namespace tessera::comm
