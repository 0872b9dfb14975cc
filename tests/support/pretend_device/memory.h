// The address space of the pretend devices. Twice 256 GiB are reserved: tensors point into the upper half, which nobody
// may touch; kernels work on the lower half, a constant below.
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
inline constexpr int kRubbish = 0xFF;  // bytes of which every floating point number is NaN

// Where the bytes of a tensor's address are. Null stays null.
void* shadow(const void* address);
// Of an address of a tensor, -1: of none.
int device_of(const void* address);
// Fresh memory of a device, full of rubbish. c10::OutOfMemoryError when its share of the space is used up.
std::byte* reserve(int device, size_t bytes);

// Of the device of the calling thread, on its current stream.
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
// As at::native::resize_bytes_cpu.
void resize_bytes(c10::StorageImpl* storage, size_t bytes);

}  // namespace tessera::pretend
