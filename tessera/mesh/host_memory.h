// Host memory for asynchronous copies from and to an accelerator. It is pinned if the device supports pinned memory.
//
//   at::Tensor shards = pinned_empty(numel, at::kByte, mesh->device());
//   const auto angles = to_device_async(x.device(), frequencies);
//
// No communication. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera {

// An uninitialised CPU tensor of shape [numel] for copies from and to `device`.
at::TensorBase pinned_empty(int64_t numel, c10::ScalarType dtype, c10::Device device);

// `tensor` on `device`, or the tensor itself if it is on `device` already. A copy from the CPU goes through pinned
// memory and is ordered on the current stream, so the host does not wait. The pinned memory is kept until the copy has
// run.
at::Tensor to_device_async(c10::Device device, const at::Tensor& tensor);

}  // namespace tessera
