#include "tessera/state/detail/incoming_tensors.h"

#include <unordered_map>

#include "tessera/comm/collectives/agreement.h"
#include "tessera/state/detail/load_tensor.h"
#include "tessera/state/detail/sharded_values.h"
#include "tessera/state/detail/state_broadcast.h"

namespace tessera::detail {

std::unique_ptr<IncomingTensors> plan_load(const StateDict& state_dict, comm::Group* group, const PlanLoad& plan) {
  std::unique_ptr<IncomingTensors> incoming;
  if (group) {
    incoming = std::make_unique<StateBroadcast>(state_dict, *group);
  } else if (auto sharded = ShardedValues::of(state_dict)) {
    group = &sharded->group();
    incoming = std::move(sharded);
  }
  if (incoming) {
    comm::attempt_together(*group, [&] { plan(incoming->message(), incoming.get()); });
  } else {
    plan(state_dict, nullptr);
  }
  return incoming;
}

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
