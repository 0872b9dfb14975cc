// Tensors on the CPU in page-locked and in shared memory. Internal to state.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::detail {

// Whether memory can be page-locked here. Warns once a process when it cannot.
bool can_pin_memory();

// As empty_like on the CPU, contiguous; pinned by the accelerator's allocator when `pin`.
at::Tensor empty_on_cpu(const at::Tensor& like, bool pin);

// The same in memory that processes forked from this one share; page-locked as well when `pin`. Unmapped with the last
// tensor. Errors: kMemory when there is none, kConfig where page-locking it is not to be had.
at::Tensor empty_in_shared_memory(const at::Tensor& like, bool pin);

}  // namespace tessera::detail
