// A second stream of an accelerator, and events to order it with the current stream. It is used for copies and for
// collectives that must not wait for all work launched so far. On a device without streams, such as the CPU, all
// functions do nothing.
//
//   DeviceStream copies(mesh->device());
//   copies.wait_current_stream();                   // the new stream waits for the work launched so far
//   {
//     const auto entered = copies.make_current();   // the new stream is this thread's current stream
//     there = host.to(device, /*non_blocking=*/true);
//   }
//   const DeviceEvent copied = copies.record_event();
//   copied.block_current_stream();                  // the current stream waits for the copy
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

// A point in the work of a stream. A default-constructed object has no event, and waiting for it returns at once.
class DeviceEvent {
 public:
  DeviceEvent() = default;
  explicit DeviceEvent(c10::Stream stream);
  // Records an event on this thread's current stream of the device.
  static DeviceEvent record_on_current(c10::Device device);

  // The current stream (or `stream`) waits for the event; the host does not wait.
  void block_current_stream() const;
  void block(c10::Stream stream) const;
  void wait() const;  // the host waits for the event

 private:
  std::optional<c10::Event> event_;
};

class DeviceStream {
 public:
  DeviceStream() = default;  // no stream; all functions do nothing
  explicit DeviceStream(c10::Device device, bool high_priority = true);

  bool exists() const { return stream_.has_value(); }
  // wait_event(): this stream waits for the event. wait_current_stream(): this stream waits for the work that this
  // thread has launched on its current stream so far.
  void wait_event(const DeviceEvent& event) const;
  void wait_current_stream() const;
  // The current stream waits for all work launched on this stream so far.
  void block_current_stream() const { record_event().block_current_stream(); }
  DeviceEvent record_event() const;
  // This stream is the thread's current stream until the returned object is destroyed.
  [[nodiscard]] c10::OptionalStreamGuard make_current() const { return c10::OptionalStreamGuard(stream_); }

 private:
  std::optional<c10::Stream> stream_;
};

// Whether the device is an accelerator that is present and supported by this libtorch.
bool has_streams(c10::Device device);

}  // namespace tessera
