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

// The constructor records the event, so the event covers the work launched on `stream` before, and nothing later.
DeviceEvent::DeviceEvent(c10::Stream stream) {
  event_.emplace(stream.device_type());
  event_->record(stream);
}

DeviceEvent DeviceEvent::record_on_current(c10::Device device) {
  return has_streams(device) ? DeviceEvent(current_stream(device)) : DeviceEvent();
}

void DeviceEvent::block_current_stream() const {
  if (event_) block(current_stream(event_->device()));
}

void DeviceEvent::block(c10::Stream stream) const {
  if (event_) event_->block(stream);
}

void DeviceEvent::wait() const {
  if (event_) event_->synchronize();
}

DeviceStream::DeviceStream(c10::Device device, bool high_priority) {
  if (has_streams(device)) {
    stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, high_priority);
  }
}

void DeviceStream::wait_event(const DeviceEvent& event) const {
  if (stream_) event.block(*stream_);
}

void DeviceStream::wait_current_stream() const {
  if (stream_) wait_event(DeviceEvent::record_on_current(stream_->device()));
}

DeviceEvent DeviceStream::record_event() const { return stream_ ? DeviceEvent(*stream_) : DeviceEvent(); }

}  // namespace tessera
