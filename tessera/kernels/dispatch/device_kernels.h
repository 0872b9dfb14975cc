// Which devices libtorch has certain kernels for.
//
//   static DeviceKernels fused{"aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"};
//   if (fused.on(x.device())) ...
//
// Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <initializer_list>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

namespace tessera::kernels {

class DeviceKernels {
 public:
  DeviceKernels(std::initializer_list<const char*> operations);
  // All of them are registered for devices of that type.
  bool on(c10::Device device) const;
  // And the chip has them, which only the kernels know: `attempt` does not throw. Tried once for a device and dtype;
  // what is thrown is logged.
  bool run_on(c10::Device device, at::ScalarType dtype, const std::function<void()>& attempt);

 private:
  std::string first_;
  std::vector<c10::OperatorHandle> operations_;
  bool known_ = true;  // to this libtorch
  std::mutex mutex_;
  std::map<std::tuple<c10::DeviceType, c10::DeviceIndex, at::ScalarType>, bool> tried_;
};

}  // namespace tessera::kernels
