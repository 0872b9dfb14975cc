#include "tessera/mesh/host_memory.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/empty.h>

namespace tessera {

at::TensorBase host_empty(int64_t numel, c10::ScalarType dtype, c10::Device device) {
  const bool pins = at::accelerator::isAccelerator(device.type()) &&
                    at::globalContext().getAcceleratorHooksInterface(device.type()).isAvailable();
  return at::empty({numel}, at::TensorOptions().dtype(dtype).device(c10::kCPU).pinned_memory(pins));
}

}  // namespace tessera
