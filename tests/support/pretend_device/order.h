// Which work of the pretend devices is ordered before which. Every stream has a clock of all streams of its device;
// launches advance it, events carry it from stream to stream, waits of the host to all of them. Every block of memory
// remembers by byte range who read and wrote it when. An access that is not ordered after the last one it conflicts
// with throws c10::Error and names both; so does freed memory.
//
//   launch(stream, "add", {{a, bytes, false}, {out, bytes, true}});      // checks, then the kernel may run
//
// The range of a strided view is from its first to its last byte. A block belongs to the stream that was current when
// it was made: its making counts as a write there, and freeing it while another stream has used it unseen (without an
// event back, or record_stream) is a fault. Thread-safe.
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
// What a tensor's elements span; none when it has none.
void add_touch(std::vector<Touch>& touches, const at::Tensor& tensor, bool writes);

c10::Stream current_stream(c10::DeviceIndex device = -1);  // of the calling thread; -1: of its current device
c10::Stream stream_of(c10::DeviceIndex device, int number);
c10::Stream next_stream(c10::DeviceIndex device, bool high_priority);

// One kernel on `stream`; `name` lives for ever. Returns the moment after it.
Moment launch(c10::Stream stream, const char* name, const std::vector<Touch>& touches);

// The first half of run(): the launch, or what a capture wants to know before the kernel runs.
void prepare(c10::Stream stream, const char* name, const std::vector<Touch>& touches);
// A kernel that a graph may hold: launched and run; where the stream captures, run for the sizes of what it makes and
// put into the graph. It works on views of the device's bytes, none of which it owns.
void run(c10::Stream stream, const char* name, const std::vector<Touch>& touches, std::function<void()> kernel);
// On the current stream of the first tensor's device, by the tensors that it reads and writes.
void run_on(const char* name, const std::vector<at::Tensor>& read, const std::vector<at::Tensor>& written,
            std::function<void()> kernel);

Moment now(c10::Stream stream);
bool host_has_seen(c10::Stream stream);  // all of it that was launched
void wait_for(c10::Stream stream, const Moment& moment);
// The host waits: until `moment`, for all of a stream, for a device.
void host_wait(int device, const Moment& moment, const char* name);
// Of an event of that stream, which does not count where the stream has been given much to do since.
void host_wait_event(c10::Stream stream, const Moment& moment, const char* name);
void host_wait(c10::Stream stream, const char* name);
void host_wait_device(int device, const char* name);

// After `moment` the host may read `target` (pinned), which holds rubbish until then.
void deliver_after(c10::Stream stream, const Moment& moment, const at::Tensor& target, const at::Tensor& values);
// Until `moment` the host leaves `source` (pinned) as it is.
void watch_until(c10::Stream stream, const Moment& moment, const at::Tensor& source);

void* take_block(c10::Stream stream, size_t bytes);
void release_block(void* address) noexcept;
void record_block(const void* address, c10::Stream stream);
void forget_idle_blocks(int device);  // the host waits for the device, as whoever frees its memory does
void reset_peak(int device);

// Graphs. A stream that captures launches nothing: its kernels are kept, what they wrote outside of the graph's own
// memory is put back at the end, and that memory is full of rubbish until a replay. Blocks taken by it come from the
// pool and go back there, so that replays find them. Waits of the host, copies from or to it, collectives, random
// numbers and events from or to what does not capture are refused, as CUDA refuses them or Tessera has no use for them.
struct Kernel {
  const char* name;
  std::vector<Touch> touches;
  std::function<void()> run;
};
bool captures(c10::Stream stream);
void refuse_capture(c10::Stream stream, const char* name);  // throws where it captures
void keep(c10::Stream stream, const char* name, const std::vector<Touch>& touches, std::function<void()> run);
void begin_capture(c10::Stream stream, uint64_t pool);
std::vector<Kernel> end_capture(c10::Stream stream);
// One launch that reads and writes what all its kernels do.
void replay(c10::Stream stream, const std::vector<Kernel>& kernels);
uint64_t new_pool();
// Graphs that use the pool; without any its memory is everybody's.
void join_pool(int device, uint64_t pool);
void leave_pool(int device, uint64_t pool) noexcept;

enum class Count { kCopyToHost, kCopyToDevice, kPageableCopy, kCollective };
void count(int device, Count what);
void add_fault(std::string text) noexcept;

}  // namespace tessera::pretend
