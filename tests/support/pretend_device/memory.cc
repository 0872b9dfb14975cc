// The address space and the allocators of the pretend devices (memory.h), also for pinned memory.
#include "tests/support/pretend_device/memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "tests/support/pretend_device/order.h"
#include "tests/support/pretend_device/pretend_device.h"

namespace tessera::pretend {
namespace {

constexpr size_t kDeviceBytes = kSpaceBytes / kDevices;
constexpr size_t kSegmentAlignment = 4096;

struct Space {
  std::byte* lower = nullptr;
  std::byte* upper = nullptr;
  std::atomic<size_t> used[kDevices] = {};

  Space() {
    void* const all = ::mmap(nullptr, 2 * kSpaceBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(all != MAP_FAILED, "[pretend] no address space of ", 2 * kSpaceBytes,
                " bytes. Raise the limit of virtual memory (ulimit -v).");
    lower = static_cast<std::byte*>(all);
    upper = lower + kSpaceBytes;
    TORCH_CHECK(::mprotect(lower, kSpaceBytes, PROT_READ | PROT_WRITE) == 0, "[pretend] mprotect failed");
  }
};

Space& space() {
  static Space* const instance = new Space;  // tensors of other statics may be freed later
  return *instance;
}

void free_block(void* address) { release_block(address); }

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Stream stream = current_stream();
    const c10::Device device = stream.device();
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, device};
    void* const address = take_block(stream, bytes);
    return {address, address, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(shadow(to), shadow(from), bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < kDevices; ++device) forget_idle_blocks(device);
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record_block(data.get(), stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const Counters now = counters(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = now.bytes;
    stats.allocated_bytes[0].peak = now.peak_bytes;
    stats.num_device_alloc = now.segments;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "[pretend] counters only grow: take differences");
  }
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
};

struct Pinned {
  std::mutex mutex;
  std::map<const std::byte*, size_t> blocks;
};

Pinned& pinned() {
  static auto* const instance = new Pinned;
  return *instance;
}

void free_pinned(void* address) {
  {
    const std::lock_guard lock(pinned().mutex);
    pinned().blocks.erase(static_cast<std::byte*>(address));
  }
  std::free(address);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(c10::kCPU)};
    void* const address = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    TORCH_CHECK(address, "[pretend] no pinned memory of ", bytes, " bytes");
    std::memset(address, kRubbish, bytes);
    const std::lock_guard lock(pinned().mutex);
    pinned().blocks[static_cast<std::byte*>(address)] = bytes;
    return {address, address, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

void* shadow(const void* address) {
  if (address == nullptr) return nullptr;
  TORCH_CHECK(device_of(address) >= 0, "[pretend] an address outside the device's memory");
  return const_cast<std::byte*>(static_cast<const std::byte*>(address)) - kSpaceBytes;
}

int device_of(const void* address) {
  const auto* const place = static_cast<const std::byte*>(address);
  if (place < space().upper || place >= space().upper + kSpaceBytes) return -1;
  return static_cast<int>(static_cast<size_t>(place - space().upper) / kDeviceBytes);
}

std::byte* reserve(int device, size_t bytes) {
  const size_t whole = (bytes + kSegmentAlignment - 1) / kSegmentAlignment * kSegmentAlignment;
  const size_t begin = space().used[device].fetch_add(whole);
  TORCH_CHECK_WITH(OutOfMemoryError, begin + whole <= kDeviceBytes, "[pretend] out of memory: ", bytes,
                   " bytes more than the ", kDeviceBytes, " of device ", device);
  std::byte* const address = space().upper + static_cast<size_t>(device) * kDeviceBytes + begin;
  std::memset(shadow(address), kRubbish, bytes);
  return address;
}

c10::Allocator* device_allocator() {
  static DeviceAllocator allocator;
  return &allocator;
}

c10::Allocator* pinned_allocator() {
  static PinnedAllocator allocator;
  return &allocator;
}

bool is_pinned(const void* address) {
  const std::lock_guard lock(pinned().mutex);
  const auto* const place = static_cast<const std::byte*>(address);
  auto found = pinned().blocks.upper_bound(place);
  return found != pinned().blocks.begin() && place < (--found)->first + found->second;
}

void resize_bytes(c10::StorageImpl* storage, size_t bytes) {
  TORCH_CHECK(storage->resizable(), "[pretend] the storage cannot be resized");
  const size_t kept = std::min(bytes, storage->nbytes());
  const c10::DeviceGuard guard(storage->device());
  c10::DataPtr memory = device_allocator()->allocate(bytes);
  if (kept > 0) {
    run(current_stream(), "resize", {{storage->data(), kept, false}, {memory.get(), kept, true}},
        [to = shadow(memory.get()), from = shadow(storage->data()), kept] { std::memcpy(to, from, kept); });
  }
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(bytes);
}

}  // namespace tessera::pretend
