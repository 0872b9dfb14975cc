#include "tessera/parallel/data_parallel/buffer_pool.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

namespace tessera {

// The idle blocks, ordered by allocator and size. A block that is in use holds a weak reference to the shelf, so its
// memory may outlive the pool; it then goes back to its allocator.
struct BufferPool::Shelf {
  using Kind = std::pair<c10::Allocator*, size_t>;  // allocator and bytes
  std::mutex mutex;
  std::multimap<Kind, c10::DataPtr> idle;
};

namespace {

constexpr size_t kGranularity = 4096;

struct Block {
  std::weak_ptr<BufferPool::Shelf> shelf;
  BufferPool::Shelf::Kind kind;
  c10::DataPtr memory;
};

void give_back(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  const auto shelf = block->shelf.lock();
  if (!shelf) return;
  const std::lock_guard lock(shelf->mutex);
  shelf->idle.emplace(block->kind, std::move(block->memory));
}

// Takes the smallest idle block of the allocator that fits, if it is at most a quarter larger than needed, and writes
// its size to `kind`. Null when there is none.
c10::DataPtr take_idle(BufferPool::Shelf& shelf, BufferPool::Shelf::Kind& kind) {
  const auto& [allocator, bytes] = kind;
  const std::lock_guard lock(shelf.mutex);
  const auto found = shelf.idle.lower_bound(kind);
  if (found == shelf.idle.end() || found->first.first != allocator || found->first.second > bytes + bytes / 4) {
    return {};
  }
  kind = found->first;
  c10::DataPtr memory = std::move(found->second);
  shelf.idle.erase(found);
  return memory;
}

}  // namespace

BufferPool::BufferPool() : shelf_(std::make_shared<Shelf>()) {}
BufferPool::~BufferPool() = default;

c10::DataPtr BufferPool::allocate(size_t bytes, c10::Device device, c10::Allocator* allocator) {
  if (allocator == nullptr) allocator = c10::GetAllocator(device.type());
  if (!device.is_cpu()) {
    const c10::DeviceGuard guard(device);  // allocators use the current device
    return allocator->allocate(bytes);
  }
  Shelf::Kind kind{allocator, std::max<size_t>(1, (bytes + kGranularity - 1) / kGranularity) * kGranularity};
  c10::DataPtr memory = take_idle(*shelf_, kind);
  if (!memory) memory = allocator->allocate(kind.second);
  void* const data = memory.get();
  return {data, new Block{shelf_, kind, std::move(memory)}, &give_back, device};
}

at::Tensor BufferPool::empty(int64_t numel, c10::ScalarType dtype, c10::Device device, c10::Allocator* allocator) {
  if (!device.is_cpu()) return at::empty({numel}, at::TensorOptions().dtype(dtype).device(device));
  const size_t bytes = static_cast<size_t>(numel) * c10::elementSize(dtype);
  c10::Storage storage(c10::Storage::use_byte_size_t{}, bytes, allocate(bytes, device, allocator), nullptr, false);
  return at::empty({0}, at::TensorOptions().dtype(dtype).device(device)).set_(storage, 0, {numel}, {1});
}

}  // namespace tessera
