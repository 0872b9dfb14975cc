// Memory of the host that an accelerator copies from and to beside its work: pinned, where there is such.
//
//   at::Tensor shards = host_empty(numel, at::kByte, mesh->device());
//   const auto angles = sent_to(x.device(), frequencies);
//
// No communication. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera {

// [numel], uninitialised, on the CPU. `device`: whose copies it is for.
at::TensorBase host_empty(int64_t numel, c10::ScalarType dtype, c10::Device device);

// `tensor` on `device`; itself where it lies there. From the CPU the host does not wait: the copy is in the order of
// the current stream, from pinned memory that lasts until it has run.
at::Tensor sent_to(c10::Device device, const at::Tensor& tensor);

}  // namespace tessera
