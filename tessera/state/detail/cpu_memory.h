// Allocates CPU tensors in page-locked memory and in shared memory. Internal to state.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::detail {

// Returns whether this process can page-lock memory. Warns once per process when it cannot.
bool can_pin_memory();

// Returns an uninitialised contiguous CPU tensor with the shape and dtype of `like`. With `pin` the accelerator's
// allocator makes it in pinned memory.
at::Tensor empty_on_cpu(const at::Tensor& like, bool pin);

// Returns a tensor as empty_on_cpu() does, but in memory that is shared with the processes forked from this one. With
// `pin` the memory is also page-locked. The memory is unmapped when the last tensor that uses it is freed. Errors:
// kMemory when the memory cannot be mapped or page-locked, kConfig when this libtorch offers no page-locking (no
// cudaHostRegister).
at::Tensor empty_in_shared_memory(const at::Tensor& like, bool pin);

}  // namespace tessera::detail
