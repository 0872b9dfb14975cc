// A second stream of an accelerator, and events to order it with the current stream. It is used for copies and for
// collectives that must not wait for all work launched so far. On a device without streams, such as the CPU, all
// functions do nothing.
//
//   SideStream copies(mesh->device());
//   copies.follow_current();                      // the side stream waits for the work launched so far
//   {
//     const auto entered = copies.enter();        // the side stream is this thread's current stream
//     there = host.to(device, /*non_blocking=*/true);
//   }
//   const StreamMark copied = copies.mark();
//   copied.hold_current();                        // the current stream waits for the copy
//
// "Current stream" is libtorch's current stream of the calling thread. The caching allocator assigns memory to the
// stream that was current at allocation. Before the memory is freed, that stream must wait for all streams that use it.
// No communication.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <optional>

namespace tessera {

// An event: a point in the work of a stream. A default-constructed mark has no event, and waiting for it returns at
// once.
class StreamMark {
 public:
  StreamMark() = default;
  explicit StreamMark(c10::Stream stream);
  // Records an event on this thread's current stream of the device.
  static StreamMark here(c10::Device device);

  // The current stream (or `stream`) waits for the event; the host does not wait.
  void hold_current() const;
  void hold(c10::Stream stream) const;
  void wait() const;  // the host waits for the event

 private:
  std::optional<c10::Event> event_;
};

class SideStream {
 public:
  SideStream() = default;  // no stream; all functions do nothing
  explicit SideStream(c10::Device device, bool high_priority = true);

  bool exists() const { return stream_.has_value(); }
  // The side stream waits for the mark, or for the work that this thread has launched on its current stream so far.
  void follow(const StreamMark& mark) const;
  void follow_current() const;
  // The current stream waits for all work launched on the side stream so far.
  void hold_current() const { mark().hold_current(); }
  StreamMark mark() const;
  // The side stream is this thread's current stream until the returned object is destroyed.
  [[nodiscard]] c10::OptionalStreamGuard enter() const { return c10::OptionalStreamGuard(stream_); }

 private:
  std::optional<c10::Stream> stream_;
};

// Whether the device is an accelerator that is present and supported by this libtorch.
bool has_streams(c10::Device device);

}  // namespace tessera
