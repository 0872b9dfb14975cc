// What tensors a thread holds at most, of those that it allocates while it is recorded.
//
//   const auto record = std::make_shared<PeakMemory>();
//   const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, record);
//   work();
//   EXPECT_LT(record->most, limit_bytes);
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstdint>

namespace tessera::testing {

struct PeakMemory final : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    now += bytes;  // less than none where it is given back
    most = std::max(most, now);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t now = 0, most = 0;
};

}  // namespace tessera::testing
