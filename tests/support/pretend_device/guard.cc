// Devices, streams and events of a thread, as libtorch's device guards need them.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include "tests/support/pretend_device/order.h"
#include "tests/support/pretend_device/registration.h"

namespace tessera::pretend {
namespace {

thread_local c10::DeviceIndex own_device = 0;
thread_local std::array<int, kDevices> own_streams{};

struct Event {
  c10::DeviceIndex device = 0;
  int stream = 0;
  Moment moment{};
  bool captured = false;
};

c10::DeviceIndex checked(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "[pretend] device ", static_cast<int>(index), " of ", kDevices);
  return index;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(c10::kPrivateUse1, own_device); }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) own_device = checked(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) own_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return current_stream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(device.has_index() ? device.index() : own_device, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return next_stream(device.has_index() ? device.index() : own_device, high_priority);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return getStreamFromGlobalPool(device, priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto& own = own_streams[static_cast<size_t>(checked(stream.device_index()))];
    const c10::Stream before = stream_of(stream.device_index(), own);
    own = static_cast<int>(stream.id());
    return before;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = {stream.device_index(), static_cast<int>(stream.id()), now(stream),
                                    captures(stream)};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const auto& from = *static_cast<Event*>(event);
    TORCH_CHECK(from.captured == captures(stream) && (!from.captured || from.stream == stream.id()),
                "[pretend] an event between a stream that captures a graph and one that does not");
    if (from.captured) return;
    if (from.device == stream.device_index()) {
      wait_for(stream, from.moment);
    } else {  // clocks of two devices know nothing of each other: as if the host had waited in between
      host_wait(from.device, from.moment, "event of another device");
    }
  }
  // A query counts as a wait, and therefore always returns true.
  bool queryEvent(void* event) const override {
    if (event != nullptr) synchronizeEvent(event);
    return true;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    const char* const visible = std::getenv(kVisibleDevices);
    return static_cast<c10::DeviceIndex>(visible ? std::clamp(std::atoi(visible), 0, kDevices) : kDevices);
  }
  bool queryStream(const c10::Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override { host_wait(stream, "synchronizeStream"); }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const auto& from = *static_cast<Event*>(event);
    host_wait_event(stream_of(from.device, from.stream), from.moment, "synchronizeEvent");
  }
  void synchronizeDevice(c10::DeviceIndex device) const override { host_wait_device(device, "synchronizeDevice"); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_block(data.get(), stream);
  }
};

}  // namespace

c10::DeviceIndex current_device() { return own_device; }

c10::Stream current_stream(c10::DeviceIndex device) {
  const c10::DeviceIndex index = device < 0 ? own_device : checked(device);
  return stream_of(index, own_streams[static_cast<size_t>(index)]);
}

void register_guard() { static const c10::impl::DeviceGuardImplRegistrar registrar(c10::kPrivateUse1, new Guard); }

}  // namespace tessera::pretend
