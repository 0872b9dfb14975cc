#include "tessera/parallel/data_parallel/buffer_pool.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

namespace tessera {

// The idle blocks, ordered by allocator and size. A block that is in use holds a weak_ptr to this object. If the pool
// has been destroyed when the block is released, the block's memory goes back to its allocator.
struct BufferPool::IdleBlocks {
  using BlockKey = std::pair<c10::Allocator*, size_t>;  // allocator and bytes
  std::mutex mutex;
  std::multimap<BlockKey, c10::DataPtr> blocks;
};

namespace {

constexpr size_t kGranularity = 4096;

struct Block {
  std::weak_ptr<BufferPool::IdleBlocks> idle_blocks;
  BufferPool::IdleBlocks::BlockKey key;
  c10::DataPtr memory;
};

void return_to_pool(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  const auto idle_blocks = block->idle_blocks.lock();
  if (!idle_blocks) return;
  const std::lock_guard lock(idle_blocks->mutex);
  idle_blocks->blocks.emplace(block->key, std::move(block->memory));
}

// Takes the smallest idle block of the allocator that fits, if it is at most a quarter larger than the request, and
// writes the block's size to `key`. Null if no idle block fits.
c10::DataPtr take_idle(BufferPool::IdleBlocks& idle_blocks, BufferPool::IdleBlocks::BlockKey& key) {
  const auto& [allocator, bytes] = key;
  const std::lock_guard lock(idle_blocks.mutex);
  const auto found = idle_blocks.blocks.lower_bound(key);
  if (found == idle_blocks.blocks.end() || found->first.first != allocator || found->first.second > bytes + bytes / 4) {
    return {};
  }
  key = found->first;
  c10::DataPtr memory = std::move(found->second);
  idle_blocks.blocks.erase(found);
  return memory;
}

}  // namespace

BufferPool::BufferPool() : idle_blocks_(std::make_shared<IdleBlocks>()) {}
BufferPool::~BufferPool() = default;

c10::DataPtr BufferPool::allocate(size_t bytes, c10::Device device, c10::Allocator* allocator) {
  if (allocator == nullptr) allocator = c10::GetAllocator(device.type());
  if (!device.is_cpu()) {
    const c10::DeviceGuard guard(device);  // allocators use the current device
    return allocator->allocate(bytes);
  }
  IdleBlocks::BlockKey key{allocator, std::max<size_t>(1, (bytes + kGranularity - 1) / kGranularity) * kGranularity};
  c10::DataPtr memory = take_idle(*idle_blocks_, key);
  if (!memory) memory = allocator->allocate(key.second);
  void* const data = memory.get();
  return {data, new Block{idle_blocks_, key, std::move(memory)}, &return_to_pool, device};
}

at::Tensor BufferPool::empty(int64_t numel, c10::ScalarType dtype, c10::Device device, c10::Allocator* allocator) {
  if (!device.is_cpu()) return at::empty({numel}, at::TensorOptions().dtype(dtype).device(device));
  const size_t bytes = static_cast<size_t>(numel) * c10::elementSize(dtype);
  c10::Storage storage(c10::Storage::use_byte_size_t{}, bytes, allocate(bytes, device, allocator), nullptr, false);
  return at::empty({0}, at::TensorOptions().dtype(dtype).device(device)).set_(storage, 0, {numel}, {1});
}

}  // namespace tessera
