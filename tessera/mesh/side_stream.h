// A stream of an accelerator beside the one that computes: for copies, and to start collectives that are not to come
// behind all that has been launched so far. The CPU has none: there nothing here does anything.
//
//   SideStream copies(mesh->device());
//   copies.follow_current();                      // comes behind what this thread has launched so far
//   {
//     const auto entered = copies.enter();        // this thread launches there
//     there = host.to(device, /*non_blocking=*/true);
//   }
//   const StreamMark copied = copies.mark();
//   copied.hold_current();                        // what this thread launches next comes behind the copy
//
// "Current" is the stream that libtorch holds for the calling thread. Memory belongs to the stream that was current
// when it was made: before it is freed, that one must come behind all that use it. No communication.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <optional>

namespace tessera {

// A place in the order of a stream: behind what it had been given. One that was made from nothing holds nobody.
class StreamMark {
 public:
  StreamMark() = default;
  explicit StreamMark(c10::Stream stream);
  // Of this thread's current stream of the device.
  static StreamMark here(c10::Device device);

  // What this thread launches next comes behind it; the host goes on.
  void hold_current() const;
  void hold(c10::Stream stream) const;
  void wait() const;  // the host waits

 private:
  std::optional<c10::Event> event_;
};

class SideStream {
 public:
  SideStream() = default;  // none
  explicit SideStream(c10::Device device, bool high_priority = true);

  bool exists() const { return stream_.has_value(); }
  // What it is given next comes behind the mark, or behind what this thread has launched so far.
  void follow(const StreamMark& mark) const;
  void follow_current() const;
  // What this thread launches next comes behind all that it was given.
  void hold_current() const { mark().hold_current(); }
  StreamMark mark() const;
  // Until the end of the returned object this thread launches there.
  [[nodiscard]] c10::OptionalStreamGuard enter() const { return c10::OptionalStreamGuard(stream_); }

 private:
  std::optional<c10::Stream> stream_;
};

// Whether the device has streams: an accelerator that this libtorch has.
bool has_streams(c10::Device device);

}  // namespace tessera
