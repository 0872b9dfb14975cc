// An accelerator that exists only in tests: libtorch's PrivateUse1 under the name "pretend", with the CPU's kernels
// behind it and an accelerator's rules in front.
//
//   pretend::install();                                            // once, before the first backward of the process
//   auto x = at::ones({4}, at::Device("pretend:0"));
//   x.data_ptr<float>()[0];                                        // a segmentation fault, as on any accelerator
//   const auto before = pretend::counters(0);
//   (x + x).sum().item<float>();
//   EXPECT_EQ((pretend::counters(0) - before).host_syncs, 1);
//   EXPECT_THAT(pretend::take_faults(), ::testing::IsEmpty());     // what destructors could not throw
//
// Kernels run at once, in the calling thread; that they were ordered is checked apart from that, as if each stream ran
// as late as it may (order.h). Fresh and freed memory is NaN. Host memory that a copy without blocking writes holds
// rubbish until the host has waited. docs/design/devices.md says what this can show and what it cannot.
// Thread-safe, apart from install().
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace tessera::pretend {

inline constexpr int kDevices = 8;
// As CUDA_VISIBLE_DEVICES in number: a process sees the first so many. Not set: all.
inline constexpr const char* kVisibleDevices = "PRETEND_VISIBLE_DEVICES";
inline constexpr int kStreams = 64;  // of each device: the default one, 31 of normal and 32 of high priority
inline constexpr int kFirstOfHighPriority = 32;

// Registers the device, its allocator, streams, generators, operations and c10d back-end. Calls after the first do
// nothing. True, so that a test program can say it in the initializer of a constant.
bool install();

// Of one device, since the program began.
struct Counters {
  int64_t launches = 0;
  int64_t host_syncs = 0;  // times that the host waited: items, shapes that depend on values, blocking copies
  int64_t copies_to_host = 0, copies_to_device = 0;
  int64_t pageable_copies = 0;  // of those, from or to host memory that is not pinned
  int64_t collectives = 0;
  int64_t allocations = 0;
  int64_t segments = 0;  // allocations that no freed block could serve
  int64_t bytes = 0, peak_bytes = 0;

  Counters operator-(const Counters& before) const;
};
Counters counters(int device);
// A kernel, copy or collective, and what it is ordered behind.
struct Launch {
  std::string name;
  int stream = 0;                                // 0: the default one
  std::array<uint64_t, kStreams> launched = {};  // how many of each stream come before it, itself included
  bool comes_behind(const Launch& other) const {
    const auto stream_of_other = static_cast<size_t>(other.stream);
    return launched[stream_of_other] >= other.launched[stream_of_other];
  }
};

// Every wait of the host, by what waited, and every launch, since the last call: for finding what a budget test
// counted, and what runs beside what. Kept from keep_names(true) on.
std::vector<std::string> take_sync_names(int device);
std::vector<Launch> take_launches(int device);
void keep_names(bool keep);

// Groups of the process that were made from another one's communicator.
int64_t groups_split();

// What was found where nothing can be thrown: blocks freed while another stream may still use them, pinned memory
// overwritten before it was copied.
std::vector<std::string> take_faults();

}  // namespace tessera::pretend
