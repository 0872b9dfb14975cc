// Flat communication buffers that are handed out again instead of returned to the system: on a CPU touching fresh
// pages costs 10 to 80 times as much as touching used ones.
//
//   auto pool = std::make_shared<BufferPool>();
//   at::Tensor gathered = pool->empty(numel, at::kFloat, device);   // goes back to the pool with its last reference
//   at::Tensor sent = pool->empty(numel, at::kFloat, device, group.allocator(c10::kCPU));
//
// Devices other than the CPU have a caching allocator already; for them the pool passes through. Thread-safe. Memory
// that is still referenced outlives the pool.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/Allocator.h>

#include <cstddef>
#include <memory>

namespace at {
class Tensor;
}

namespace tessera {

class BufferPool {
 public:
  BufferPool();
  ~BufferPool();
  // Uninitialised memory, aligned to 64 bytes; of `allocator`, which outlives it; null: the usual one of the device.
  c10::DataPtr allocate(size_t bytes, c10::Device device, c10::Allocator* allocator = nullptr);
  at::Tensor empty(int64_t numel, c10::ScalarType dtype, c10::Device device, c10::Allocator* allocator = nullptr);

  struct Shelf;

 private:
  std::shared_ptr<Shelf> shelf_;
};

}  // namespace tessera
