// What tensors a piece of work needs at most, beyond those that were there before.
//
//   EXPECT_LT(peak_bytes_of([&] { model.loss(x).backward(); }), limit_bytes);                 // on the CPU
//   EXPECT_LT(peak_bytes_of(test_device(), [&] { model.loss(x).backward(); }), limit_bytes);
#pragma once

#include <ATen/DeviceAccelerator.h>
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

// Of the CPU: what this thread allocates; the backward that it runs counts.
inline int64_t peak_bytes_of(const std::function<void()>& work) {
  const auto record = std::make_shared<PeakMemory>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, record);
  work();
  return record->most;
}

// Of an accelerator: what all threads allocate there.
inline int64_t peak_bytes_of(c10::Device device, const std::function<void()>& work) {
  if (device.is_cpu()) return peak_bytes_of(work);
  const auto bytes = [&] { return at::accelerator::getDeviceStats(device.index()).allocated_bytes[0]; };
  at::accelerator::resetPeakStats(device.index());
  const int64_t before = bytes().current;
  work();
  return bytes().peak - before;
}

}  // namespace tessera::testing
