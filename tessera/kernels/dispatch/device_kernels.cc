#include "tessera/kernels/dispatch/device_kernels.h"

#include <c10/core/GradMode.h>

#include <algorithm>

#include "tessera/base/log.h"

namespace tessera::kernels {

DeviceKernels::DeviceKernels(std::initializer_list<const char*> operations) : first_(*operations.begin()) {
  for (const char* name : operations) {
    const auto found = c10::Dispatcher::singleton().findSchema({name, ""});
    if (found) operations_.push_back(*found);
    known_ = known_ && found.has_value();
  }
}

bool DeviceKernels::are_registered_for(c10::Device device) const {
  if (!known_ || device.is_cpu() || device.is_meta()) return false;
  const auto key = c10::computeDispatchKey(std::nullopt, std::nullopt, device);
  return std::ranges::all_of(operations_, [key](const auto& each) { return each.hasKernelForDispatchKey(key); });
}

bool DeviceKernels::work_on(c10::Device device, at::ScalarType dtype, const std::function<void()>& attempt) {
  if (!are_registered_for(device)) return false;
  const std::lock_guard lock(mutex_);
  const auto [found, fresh] = tried_.try_emplace({device.type(), device.index(), dtype}, false);
  if (!fresh) return found->second;
  try {
    const c10::NoGradGuard no_grad;
    attempt();
    found->second = true;
  } catch (const c10::Error& error) {
    log_info("[kernels] {} runs without {} in {}: {}", device.str(), first_, c10::toString(dtype),
             error.what_without_backtrace());
  }
  return found->second;
}

}  // namespace tessera::kernels
