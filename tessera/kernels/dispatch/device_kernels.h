// Tells whether libtorch has certain kernels for a device.
//
//   static DeviceKernels fused{"aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"};
//   if (fused.are_registered_for(x.device())) ...
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
  // Returns whether all operations that were given to the constructor have a kernel for this device type. Always false
  // for CPU and meta.
  bool are_registered_for(c10::Device device) const;
  // Returns whether are_registered_for() is true and the kernels work on the chip. Only a call of the kernels shows
  // whether they work. So `attempt` must call them; if it throws c10::Error, the result is false and the error is
  // logged. `attempt` runs once per device and dtype.
  bool work_on(c10::Device device, at::ScalarType dtype, const std::function<void()>& attempt);

 private:
  std::string first_;
  std::vector<c10::OperatorHandle> operations_;
  bool known_ = true;  // this libtorch has all the operations
  std::mutex mutex_;
  std::map<std::tuple<c10::DeviceType, c10::DeviceIndex, at::ScalarType>, bool> tried_;
};

}  // namespace tessera::kernels
