// The address space of the pretend devices. Twice 256 GiB are reserved: tensors point into the upper half, which no
// code may access; kernels work on the lower half, at a constant distance below.
//
//   std::byte* own = reserve(device, 1 << 20);      // an address for tensors
//   std::memset(shadow(own), 0xFF, 1 << 20);        // the bytes behind it
//
// Thread-safe.
#pragma once

#include <c10/core/StorageImpl.h>

#include <cstddef>

namespace tessera::pretend {

inline constexpr size_t kSpaceBytes = size_t{256} << 30;
inline constexpr int kRubbish = 0xFF;  // floating point numbers of such bytes are NaN

// The address at which the bytes of a tensor's address are. Null stays null.
void* shadow(const void* address);
// The device of a tensor's address; -1 for an address of no device.
int device_of(const void* address);
// New memory of a device, filled with kRubbish. Throws c10::OutOfMemoryError if the device's share of the space is used
// up.
std::byte* reserve(int device, size_t bytes);

// The allocator for the calling thread's device and current stream.
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
// The same as at::native::resize_bytes_cpu.
void resize_bytes(c10::StorageImpl* storage, size_t bytes);

}  // namespace tessera::pretend
