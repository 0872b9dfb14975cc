// The accelerator hooks of libtorch for the pretend device, and its random number generators, which are the CPU's.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/util/Exception.h>

#include <array>

#include "tests/support/pretend_device/memory.h"
#include "tests/support/pretend_device/order.h"
#include "tests/support/pretend_device/registration.h"

namespace tessera::pretend {
namespace {

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  DeviceGenerator(c10::DeviceIndex device, at::Generator host)
      : GeneratorImpl(c10::Device(c10::kPrivateUse1, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host_(std::move(host)) {}
  explicit DeviceGenerator(c10::DeviceIndex device)
      : DeviceGenerator(device, at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val)) {}

  void set_current_seed(uint64_t seed) override {
    host_.set_current_seed(seed);
    offset_ = 0;
  }
  // An offset as Philox generators have; the CPU generator that is used has none.
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return host_.current_seed(); }
  uint64_t seed() override { return host_.seed(); }
  void set_state(const c10::TensorImpl& state) override { host_.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host_.unsafeGetGeneratorImpl()->get_state(); }
  static c10::DeviceType device_type() { return c10::kPrivateUse1; }

  at::Generator host_;

 private:
  uint64_t offset_ = 0;

  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device().index(), host_.clone()); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<DeviceGenerator>(device < 0 ? current_device() : device);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    const int device = device_of(data);
    TORCH_CHECK(device >= 0, "[pretend] an address outside the device's memory");
    return at::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device));
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { guard().setDevice({c10::kPrivateUse1, device}); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return guard().exchangeDevice({c10::kPrivateUse1, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_bytes(storage.unsafeGetStorageImpl(), bytes);
  }

 private:
  static const c10::impl::DeviceGuardImplInterface& guard() {
    return *c10::impl::getDeviceGuardImpl(c10::kPrivateUse1);
  }
};

}  // namespace

const at::Generator& default_generator(int device) {
  static auto* const generators = [] {
    auto* made = new std::array<at::Generator, kDevices>;
    for (int i = 0; i < kDevices; ++i) {
      (*made)[static_cast<size_t>(i)] = at::make_generator<DeviceGenerator>(static_cast<c10::DeviceIndex>(i));
    }
    return made;
  }();
  return generators->at(static_cast<size_t>(device));
}

at::Generator host_generator(const at::Generator& generator) { return generator.get<DeviceGenerator>()->host_; }

void register_hooks() { at::RegisterPrivateUse1HooksInterface(new Hooks); }

}  // namespace tessera::pretend
