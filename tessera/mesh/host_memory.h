// Memory of the host that an accelerator copies from and to beside its work: pinned, where there is such.
//
//   at::Tensor shards = host_empty(numel, at::kByte, mesh->device());
//
// No communication. Thread-safe.
#pragma once

#include <ATen/core/TensorBase.h>

#include <cstdint>

namespace tessera {

// [numel], uninitialised, on the CPU. `device`: whose copies it is for.
at::TensorBase host_empty(int64_t numel, c10::ScalarType dtype, c10::Device device);

}  // namespace tessera
