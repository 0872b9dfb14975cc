#include "tessera/mesh/device_stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "tessera/comm/backends/device_backends.h"

namespace tessera {
namespace {

c10::Stream current_stream(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

}  // namespace

bool has_streams(c10::Device device) {
  return !device.is_cpu() && !device.is_meta() && comm::visible_devices(device.type()) > 0;
}

// An event is recorded when the mark is made, so the mark covers the work launched before it and nothing later.
StreamMark::StreamMark(c10::Stream stream) {
  event_.emplace(stream.device_type());
  event_->record(stream);
}

StreamMark StreamMark::here(c10::Device device) {
  return has_streams(device) ? StreamMark(current_stream(device)) : StreamMark();
}

void StreamMark::hold_current() const {
  if (event_) hold(current_stream(event_->device()));
}

void StreamMark::hold(c10::Stream stream) const {
  if (event_) event_->block(stream);
}

void StreamMark::wait() const {
  if (event_) event_->synchronize();
}

SideStream::SideStream(c10::Device device, bool high_priority) {
  if (has_streams(device)) {
    stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, high_priority);
  }
}

void SideStream::follow(const StreamMark& mark) const {
  if (stream_) mark.hold(*stream_);
}

void SideStream::follow_current() const {
  if (stream_) follow(StreamMark::here(stream_->device()));
}

StreamMark SideStream::mark() const { return stream_ ? StreamMark(*stream_) : StreamMark(); }

}  // namespace tessera
