// An accelerator that exists only in tests: libtorch's PrivateUse1 under the name "pretend". The device computes with
// the CPU's kernels and enforces an accelerator's rules.
//
//   pretend::install();                                            // once, before the first backward of the process
//   auto x = at::ones({4}, at::Device("pretend:0"));
//   x.data_ptr<float>()[0];                                        // a segmentation fault, as on any accelerator
//   const auto before = pretend::counters(0);
//   (x + x).sum().item<float>();
//   EXPECT_EQ((pretend::counters(0) - before).host_syncs, 1);
//   EXPECT_THAT(pretend::take_faults(), ::testing::IsEmpty());     // what destructors could not throw
//
// Kernels run at once, in the calling thread. Their order is checked separately, as if each stream ran as late as
// possible (order.h). New and freed memory is NaN. If a non-blocking copy writes host memory, this memory is filled
// with NaN until the host has waited. docs/design/devices.md says which faults the device finds and which it does not.
// Thread-safe, except install().
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace tessera::pretend {

inline constexpr int kDevices = 8;
// The number of devices that a process sees, counted from the first, like CUDA_VISIBLE_DEVICES. If not set, all devices
// are visible.
inline constexpr const char* kVisibleDevices = "PRETEND_VISIBLE_DEVICES";
inline constexpr int kStreams = 64;  // per device: the default stream, 31 of normal and 32 of high priority
inline constexpr int kFirstOfHighPriority = 32;

// Registers the device, its allocator, streams, generators, operations and c10d back-end. Later calls do nothing.
// Returns true, so that a test program can call it in the initializer of a constant.
bool install();

// Counters of one device, since the start of the program.
struct Counters {
  int64_t launches = 0;
  int64_t host_syncs = 0;  // waits of the host: items, shapes that depend on values, blocking copies
  int64_t copies_to_host = 0, copies_to_device = 0;
  int64_t pageable_copies = 0;  // copies from or to host memory that is not pinned
  int64_t collectives = 0;
  int64_t allocations = 0;
  int64_t segments = 0;  // allocations that no freed block could serve
  int64_t bytes = 0, peak_bytes = 0;

  Counters operator-(const Counters& before) const;
};
Counters counters(int device);
// A kernel, copy or collective, and the work before it.
struct Launch {
  std::string name;
  int stream = 0;                                // 0: the default stream
  std::array<uint64_t, kStreams> launched = {};  // launches per stream that come before this, with itself
  bool comes_behind(const Launch& other) const {
    const auto stream_of_other = static_cast<size_t>(other.stream);
    return launched[stream_of_other] >= other.launched[stream_of_other];
  }
};

// Names of all waits of the host, and all launches, since the last call. Tests use them to find the operations behind a
// count, and operations that run concurrently. Stored only after keep_names(true).
std::vector<std::string> take_sync_names(int device);
std::vector<Launch> take_launches(int device);
void keep_names(bool keep);

// Number of groups in this process that were split from another communicator.
int64_t groups_split();

// Faults in places that cannot throw: blocks that are freed while another stream may still use them, and pinned memory
// that is overwritten before its copy.
std::vector<std::string> take_faults();

}  // namespace tessera::pretend
