#include "tessera/checkpoint/snapshot_pool.h"

#include "tessera/mesh/host_memory.h"

namespace tessera {

at::Tensor SnapshotPool::copy(const at::Tensor& tensor) {
  const auto found = free_.find({!tensor.is_cpu(), tensor.scalar_type(), tensor.numel()});
  at::Tensor memory;
  if (found == free_.end()) {
    memory = pinned_empty(tensor.numel(), tensor.scalar_type(), tensor.device());
  } else {
    memory = std::move(found->second);
    free_.erase(found);
  }
  if (tensor.is_cpu()) return memory.view(tensor.sizes()).copy_(tensor);
  return memory.view(tensor.sizes()).copy_(tensor.contiguous(), /*non_blocking=*/true);
}

void SnapshotPool::recycle(const at::Tensor& copy) {
  if (copy.numel() == 0) return;
  free_.emplace(std::tuple(copy.is_pinned(), copy.scalar_type(), copy.numel()), copy.view({-1}));
}

}  // namespace tessera
