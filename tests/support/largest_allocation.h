// The largest tensor that this thread allocates while the record is active.
//
//   const auto record = std::make_shared<LargestAllocation>();
//   const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, record);
//   work();
//   EXPECT_LT(record->largest, limit_bytes);
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstdint>

namespace tessera::testing {

struct LargestAllocation final : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    largest = std::max(largest, bytes);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t largest = 0;
};

}  // namespace tessera::testing
