#include "tessera/parallel/detail/buffer_pool.h"

#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/alloc_cpu.h>

#include <map>
#include <mutex>

namespace tessera::parallel {

struct BufferPool::Shelf {
  std::mutex mutex;
  std::multimap<size_t, void*> idle;
  size_t idle_bytes = 0;

  ~Shelf() { clear(); }
  void clear() {
    for (const auto& [bytes, data] : idle) c10::free_cpu(data);
    idle.clear();
    idle_bytes = 0;
  }
};

namespace {

constexpr size_t kGranularity = 4096;

struct Block {
  std::weak_ptr<BufferPool::Shelf> shelf;
  void* data;
  size_t bytes;
};

void give_back(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  auto shelf = block->shelf.lock();
  if (!shelf) return c10::free_cpu(block->data);
  std::lock_guard lock(shelf->mutex);
  shelf->idle.emplace(block->bytes, block->data);
  shelf->idle_bytes += block->bytes;
}

// The smallest idle block that fits and wastes at most a quarter; null when there is none.
void* take_idle(BufferPool::Shelf& shelf, size_t& bytes) {
  std::lock_guard lock(shelf.mutex);
  auto found = shelf.idle.lower_bound(bytes);
  if (found == shelf.idle.end() || found->first > bytes + bytes / 4) return nullptr;
  void* data = found->second;
  bytes = found->first;
  shelf.idle_bytes -= bytes;
  shelf.idle.erase(found);
  return data;
}

}  // namespace

BufferPool::BufferPool() : shelf_(std::make_shared<Shelf>()) {}
BufferPool::~BufferPool() = default;

c10::DataPtr BufferPool::allocate(size_t bytes, c10::Device device) {
  if (!device.is_cpu()) return c10::GetAllocator(device.type())->allocate(bytes);
  size_t size = (bytes + kGranularity - 1) / kGranularity * kGranularity;
  if (size == 0) size = kGranularity;
  void* data = take_idle(*shelf_, size);
  if (data == nullptr) data = c10::alloc_cpu(size);
  return {data, new Block{shelf_, data, size}, &give_back, device};
}

at::Tensor BufferPool::empty(int64_t numel, c10::ScalarType dtype, c10::Device device) {
  const size_t bytes = static_cast<size_t>(numel) * c10::elementSize(dtype);
  c10::Storage storage(c10::Storage::use_byte_size_t{}, bytes, allocate(bytes, device), nullptr, false);
  return at::empty({0}, at::TensorOptions().dtype(dtype).device(device)).set_(storage, 0, {numel}, {1});
}

size_t BufferPool::idle_bytes() const {
  std::lock_guard lock(shelf_->mutex);
  return shelf_->idle_bytes;
}

void BufferPool::trim() {
  std::lock_guard lock(shelf_->mutex);
  shelf_->clear();
}

}  // namespace tessera::parallel
