#include "tessera/parallel/fsdp/fixed_address_buffers.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>

namespace tessera {

struct FixedAddressBuffers::Buffer {
  size_t bytes = 0;
  bool taken = false;
  c10::DataPtr memory;
};

// A shared buffer must be as large as the largest group that uses it. All groups are added before the first acquire()
// allocates memory, so the sizes are final when it does.
size_t FixedAddressBuffers::add_alternating(size_t bytes) {
  constexpr size_t kSharedBuffers = 2;
  const size_t turn = turns_++ % kSharedBuffers;
  if (turn == shared_.size()) shared_.push_back(add(0));
  auto& buffer = *buffers_[shared_[turn]];
  buffer.bytes = std::max(buffer.bytes, bytes);
  return shared_[turn];
}

size_t FixedAddressBuffers::add(size_t bytes) {
  buffers_.push_back(std::make_shared<Buffer>(Buffer{.bytes = bytes, .memory = {}}));
  return buffers_.size() - 1;
}

c10::DataPtr FixedAddressBuffers::acquire(size_t buffer) {
  const auto& found = buffers_[buffer];
  if (found->taken) return {};
  if (!found->memory) {
    const c10::DeviceGuard guard(device_);
    found->memory = c10::GetAllocator(device_.type())->allocate(found->bytes);
  }
  found->taken = true;
  // The returned pointer keeps the buffer alive, so it may outlive this object. Its deleter only marks the buffer as
  // free: the address stays reserved.
  const auto give_back = [](void* context) {
    const std::unique_ptr<std::shared_ptr<Buffer>> kept(static_cast<std::shared_ptr<Buffer>*>(context));
    (*kept)->taken = false;
  };
  return {found->memory.get(), new std::shared_ptr<Buffer>(found), give_back, device_};
}

}  // namespace tessera
