#include "tessera/mesh/host_memory.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/empty.h>

namespace tessera {
namespace {

bool pins_for(c10::Device device) {
  return at::accelerator::isAccelerator(device.type()) &&
         at::globalContext().getAcceleratorHooksInterface(device.type()).isAvailable();
}

}  // namespace

at::TensorBase pinned_empty(int64_t numel, c10::ScalarType dtype, c10::Device device) {
  return at::empty({numel}, at::TensorOptions().dtype(dtype).device(c10::kCPU).pinned_memory(pins_for(device)));
}

// pin_memory() copies the tensor to pinned memory. The caching host allocator does not reuse this memory before the
// copy to the device has run on the stream.
at::Tensor to_device_async(c10::Device device, const at::Tensor& tensor) {
  const bool pin = tensor.is_cpu() && pins_for(device);
  return pin ? tensor.pin_memory().to(device, /*non_blocking=*/true) : tensor.to(device);
}

}  // namespace tessera
