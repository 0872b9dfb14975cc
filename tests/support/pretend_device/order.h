// Checks which work of the pretend devices is ordered before which. Every stream has a vector clock of all streams of
// its device. Launches advance the clock, events carry it from stream to stream, and waits of the host carry it to all
// streams. Every block of memory stores by byte range which access read or wrote it, and when. An access that is not
// ordered after the last conflicting access throws c10::Error, which names both; an access to freed memory throws, too.
//
//   launch(stream, "add", {{a, bytes, false}, {out, bytes, true}});      // checks, then the kernel may run
//
// The range of a strided view is from its first to its last byte. A block belongs to the stream that was current at its
// allocation. The allocation counts as a write on this stream. If another stream has used the block, and neither an
// event back nor record_stream makes this use visible, freeing the block is a fault. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/pretend_device/pretend_device.h"

namespace tessera::pretend {

using Moment = std::array<uint64_t, kStreams>;

struct Touch {
  const void* begin;
  size_t bytes;
  bool writes;
};
// Adds the range of the tensor's elements; adds nothing for a tensor without elements.
void add_touch(std::vector<Touch>& touches, const at::Tensor& tensor, bool writes);

c10::Stream current_stream(c10::DeviceIndex device = -1);  // of the calling thread; -1: its current device
c10::Stream stream_of(c10::DeviceIndex device, int number);
c10::Stream next_stream(c10::DeviceIndex device, bool high_priority);

// One kernel on `stream`. `name` must stay valid for ever. Returns the moment after the kernel.
Moment launch(c10::Stream stream, const char* name, const std::vector<Touch>& touches);

// The first half of run(): the launch, or the checks of a capture before the kernel runs.
void prepare(c10::Stream stream, const char* name, const std::vector<Touch>& touches);
// A kernel that a graph may contain. run() launches and runs the kernel. If the stream captures, the kernel runs only
// to find the sizes of its results, and is put into the graph. The kernel works on views of the device's bytes and owns
// none of them.
void run(c10::Stream stream, const char* name, const std::vector<Touch>& touches, std::function<void()> kernel);
// Runs on the current stream of the first tensor's device. The touches are the tensors that the kernel reads and
// writes.
void run_on(const char* name, const std::vector<at::Tensor>& read, const std::vector<at::Tensor>& written,
            std::function<void()> kernel);

Moment now(c10::Stream stream);
bool host_has_seen(c10::Stream stream);  // true if the host has seen all launched work
void wait_for(c10::Stream stream, const Moment& moment);
// The host waits until `moment`, for all work of a stream, or for a device.
void host_wait(int device, const Moment& moment, const char* name);
// The host waits for an event of `stream`. The wait is not counted if the stream has received much work since the
// event.
void host_wait_event(c10::Stream stream, const Moment& moment, const char* name);
void host_wait(c10::Stream stream, const char* name);
void host_wait_device(int device, const char* name);

// After `moment` the host may read `target` (pinned). Until then `target` is filled with kRubbish.
void deliver_after(c10::Stream stream, const Moment& moment, const at::Tensor& target, const at::Tensor& values);
// Until `moment` the host must not change `source` (pinned).
void watch_until(c10::Stream stream, const Moment& moment, const at::Tensor& source);

void* take_block(c10::Stream stream, size_t bytes);
void release_block(void* address) noexcept;
void record_block(const void* address, c10::Stream stream);
void forget_idle_blocks(int device);  // the host waits for the device, as before memory is returned to it
void reset_peak(int device);

// Graphs. A stream that captures launches nothing: its kernels are stored. At the end of the capture, memory outside
// the graph gets its earlier values back, and the graph's own memory is filled with kRubbish until a replay. Blocks
// that a capture takes come from the pool and go back there, so that replays find them. Waits of the host, copies from
// or to the host, collectives, random numbers, and events between a capturing stream and another one are refused,
// because CUDA refuses them or Tessera does not use them.
struct Kernel {
  const char* name;
  std::vector<Touch> touches;
  std::function<void()> run;
};
bool captures(c10::Stream stream);
void refuse_capture(c10::Stream stream, const char* name);  // throws if the stream captures
void keep(c10::Stream stream, const char* name, const std::vector<Touch>& touches, std::function<void()> run);
void begin_capture(c10::Stream stream, uint64_t pool);
std::vector<Kernel> end_capture(c10::Stream stream);
// One launch, with the reads and writes of all its kernels.
void replay(c10::Stream stream, const std::vector<Kernel>& kernels);
uint64_t new_pool();
// Counts the graphs that use the pool. The memory of a pool without graphs becomes available to all.
void join_pool(int device, uint64_t pool);
void leave_pool(int device, uint64_t pool) noexcept;

enum class Count { kCopyToHost, kCopyToDevice, kPageableCopy, kCollective };
void count(int device, Count what);
void add_fault(std::string text) noexcept;

}  // namespace tessera::pretend
