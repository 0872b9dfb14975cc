#include "tessera/state/detail/incoming_tensors.h"

#include <unordered_map>

#include "tessera/state/detail/load_tensor.h"

namespace tessera::detail {

void load_copies(const std::vector<TensorCopy>& copies, IncomingTensors* incoming, c10::Device device) {
  std::unordered_map<const c10::TensorImpl*, std::vector<at::Tensor>> awaited;
  for (const auto& copy : copies) {
    if (incoming && incoming->announces(copy.source)) {
      awaited[copy.source.unsafeGetTensorImpl()].push_back(copy.target);
    } else {
      load_tensor(copy.target, copy.source);
    }
  }
  if (!incoming) return;
  incoming->each(device, [&](const at::Tensor& announced, const at::Tensor& values) {
    const auto found = awaited.find(announced.unsafeGetTensorImpl());
    if (found == awaited.end()) return;
    for (const auto& target : found->second) load_tensor(target, values);
  });
}

}  // namespace tessera::detail
