// Registers all parts of the pretend device (registration.h).
#include <c10/core/Allocator.h>
#include <c10/core/DeviceType.h>

#include <mutex>

#include "tests/support/pretend_device/memory.h"
#include "tests/support/pretend_device/pretend_device.h"
#include "tests/support/pretend_device/registration.h"

namespace tessera::pretend {

bool install() {
  static std::once_flag once;
  std::call_once(once, [] {
    c10::register_privateuse1_backend("pretend");
    c10::SetAllocator(c10::kPrivateUse1, device_allocator());
    register_guard();
    register_hooks();
    register_operations();
    register_copies();
    register_fallback();
    register_attention();
    register_normalization();
    register_log_sigmoid();
    register_float8();
    register_backend();
    register_graphs();
  });
  return true;
}

}  // namespace tessera::pretend
