// The device of each rank in tests (ranks_device.h).
#include "tests/support/ranks_device.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdlib>

namespace tessera::testing {
namespace {

thread_local c10::Device device_of_rank(c10::kCPU);

}  // namespace

std::string device_type_of_ranks() {
  const char* wanted = std::getenv("TESSERA_TEST_DEVICE");
  return wanted == nullptr ? "cpu" : wanted;
}

c10::Device test_device() { return device_of_rank; }
std::string test_device_type() { return c10::DeviceTypeName(device_of_rank.type(), /*lower_case=*/true); }
at::Tensor here(const at::Tensor& tensor) { return tensor.to(device_of_rank); }

bool devices_suffice(int ranks) {
  const c10::Device wanted(device_type_of_ranks());
  return wanted.is_cpu() || ranks <= c10::impl::VirtualGuardImpl(wanted.type()).deviceCount();
}

void use_device_of_rank(int rank) {
  const c10::Device wanted(device_type_of_ranks());
  if (wanted.is_cpu()) return;
  device_of_rank = c10::Device(wanted.type(), static_cast<c10::DeviceIndex>(rank));
  c10::impl::VirtualGuardImpl(wanted.type()).setDevice(device_of_rank);
}

}  // namespace tessera::testing
