// A pool of flat communication buffers, which are reused instead of returned to the system. On a CPU, first use of
// fresh pages costs 10 to 80 times as much as use of touched pages.
//
//   auto pool = std::make_shared<BufferPool>();
//   at::Tensor gathered = pool->empty(numel, at::kFloat, device);   // returns to the pool with its last reference
//   at::Tensor sent = pool->empty(numel, at::kFloat, device, group.allocator(c10::kCPU));
//
// Devices other than the CPU have a caching allocator, so the pool forwards their requests to it. Thread-safe. Memory
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
  // Uninitialised memory of `bytes` bytes, aligned to 64 bytes, from `allocator`, which must outlive the memory. If
  // `allocator` is null, the device's default allocator is used.
  c10::DataPtr allocate(size_t bytes, c10::Device device, c10::Allocator* allocator = nullptr);
  // Memory as allocate() returns it, as a 1-d tensor of `numel` elements. On devices other than the CPU `allocator` is
  // ignored.
  at::Tensor empty(int64_t numel, c10::ScalarType dtype, c10::Device device, c10::Allocator* allocator = nullptr);

  struct IdleBlocks;

 private:
  std::shared_ptr<IdleBlocks> idle_blocks_;
};

}  // namespace tessera
