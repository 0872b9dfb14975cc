// Peak memory of the tensors that some work allocates, without the tensors that existed before.
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
    now += bytes;  // negative when memory is freed
    most = std::max(most, now);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t now = 0, most = 0;
};

// On the CPU: memory that this thread allocates, also in the backward that it runs.
inline int64_t peak_bytes_of(const std::function<void()>& work) {
  const auto record = std::make_shared<PeakMemory>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, record);
  work();
  return record->most;
}

// On an accelerator: memory that all threads allocate there.
inline int64_t peak_bytes_of(c10::Device device, const std::function<void()>& work) {
  if (device.is_cpu()) return peak_bytes_of(work);
  const auto bytes = [&] { return at::accelerator::getDeviceStats(device.index()).allocated_bytes[0]; };
  at::accelerator::resetPeakStats(device.index());
  const int64_t before = bytes().current;
  work();
  return bytes().peak - before;
}

}  // namespace tessera::testing
