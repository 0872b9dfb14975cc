#include "tessera/checkpoint/snapshot_pool.h"

#include <ATen/ops/empty.h>

namespace tessera {

at::Tensor SnapshotPool::copy(const at::Tensor& tensor) {
  const auto found = free_.find({tensor.scalar_type(), tensor.numel()});
  at::Tensor memory;
  if (found == free_.end()) {
    memory = at::empty({tensor.numel()}, tensor.options().device(at::kCPU));
  } else {
    memory = std::move(found->second);
    free_.erase(found);
  }
  return memory.view(tensor.sizes()).copy_(tensor);
}

void SnapshotPool::give_back(const at::Tensor& copy) {
  if (copy.numel() == 0) return;
  free_.emplace(std::pair(copy.scalar_type(), copy.numel()), copy.view({-1}));
}

}  // namespace tessera
