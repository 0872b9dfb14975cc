// What tensors of the CPU a thread holds at most, of those that it allocates meanwhile; the backward that it runs
// counts.
//
//   EXPECT_LT(peak_bytes_of([&] { model.loss(x).backward(); }), limit_bytes);
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>

namespace tessera::testing {

struct PeakMemory final : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    now += bytes;  // less than none where it is given back
    most = std::max(most, now);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t now = 0, most = 0;
};

inline int64_t peak_bytes_of(const std::function<void()>& work) {
  const auto record = std::make_shared<PeakMemory>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, record);
  work();
  return record->most;
}

}  // namespace tessera::testing
