#include "tessera/state/detail/incoming_tensors.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/agreement.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/state/broadcast_state.h"
#include "tessera/state/detail/load_tensor.h"
#include "tessera/state/sharded_tensor.h"
#include "tessera/state/state_dict_structure.h"
#include "tessera/state/state_message.h"

namespace tessera::detail {
namespace {

bool can_be_gathered(const StateValue& value) {
  return value.is_sharded() && value.sharded() && value.sharded()->group;
}

}  // namespace

// Rank 0 sends its dict with meta tensors in place of tensors with dims. The announced tensors are numbered in the
// order of visit_tensors. That order is the same on rank 0 (for `full`) and on all ranks (for the decoded dict), so the
// i-th announced tensor is rank 0's i-th tensor with dims.
std::unique_ptr<IncomingTensors> IncomingTensors::of_first_rank(const StateDict& full, comm::Group& group) {
  std::string bytes;
  comm::attempt_together(group, [&] {
    if (group.rank() != 0) return;
    bytes = encode_state(full, TensorsInMessage::kShapes);
    visit_tensors(full, [](const at::Tensor& tensor) {
      TESSERA_CHECK(!tensor.is_meta(), ErrorKind::kShape,
                    "[state.broadcast] found a tensor on the meta device, which has no values");
    });
  });
  bytes = comm::broadcast_bytes(group, bytes);
  auto incoming = std::make_unique<IncomingTensors>();
  incoming->group_ = &group;
  incoming->message_ = std::move(decode_state(bytes).dict());
  auto& parts = incoming->parts_;
  visit_tensors(incoming->message_, [&](const at::Tensor& tensor) {
    if (tensor.is_meta()) parts.push_back({.announced = tensor});
  });
  incoming->index_parts();
  if (group.rank() != 0) return incoming;
  size_t next = 0;  // index of the next tensor with dims, in the order in which they are announced
  visit_tensors(full, [&](const at::Tensor& tensor) {
    if (tensor.dim() > 0) parts[next++].values = tensor;
  });
  return incoming;
}

std::unique_ptr<IncomingTensors> IncomingTensors::of_shards(const StateDict& state_dict) {
  if (!any_leaf(state_dict, can_be_gathered)) return nullptr;  // the usual case, before anything is copied
  auto incoming = std::make_unique<IncomingTensors>();
  incoming->message_ = state_dict;
  incoming->announce_shards(incoming->message_, "");
  auto& parts = incoming->parts_;
  if (parts.empty()) return nullptr;
  // Sorting by path gives all ranks one order of all-gathers, whatever the insertion order of their dicts.
  std::ranges::sort(parts, {}, &Part::path);
  incoming->group_ = parts.front().shards->group.get();
  incoming->index_parts();
  incoming->agree_on_shards();
  return incoming;
}

// Replaces each ShardedTensor with a group by a meta tensor of its whole shape, and records both in parts_.
void IncomingTensors::announce_shards(StateDict& dict, const std::string& prefix) {
  for (auto& [key, value] : dict) {
    const auto path = prefix + to_string(key);
    if (value.is_dict()) announce_shards(value.dict(), path + ".");
    if (!can_be_gathered(value)) continue;
    const auto& sharded = value.sharded();
    const auto announced = at::empty(sharded->size, at::TensorOptions(sharded->dtype).device(c10::kMeta));
    parts_.push_back({.announced = announced, .shards = sharded, .path = path});
    value = announced;
  }
}

// Each ShardedTensor is gathered by its own group, in the order of the paths. Ranks with different paths, shapes or
// groups would call different collectives and hang, so the lists are compared first.
void IncomingTensors::agree_on_shards() const {
  comm::Facts facts;
  for (const auto& part : parts_) {
    facts.emplace_back(part.path,
                       fmt::format("a ShardedTensor of {} [{}] over ranks {}", c10::toString(part.shards->dtype),
                                   fmt::join(part.shards->size, ", "), fmt::join(part.shards->group->ranks(), ",")));
  }
  check_alike(group(), facts, "Load on each rank the dict that was saved on it.");
}

void IncomingTensors::index_parts() {
  for (size_t i = 0; i < parts_.size(); ++i) position_.emplace(parts_[i].announced.unsafeGetTensorImpl(), i);
}

bool IncomingTensors::are_known_to_differ(const at::Tensor& a, const at::Tensor& b) const {
  const auto &first = parts_[position_.at(a.unsafeGetTensorImpl())].shards,
             &second = parts_[position_.at(b.unsafeGetTensorImpl())].shards;
  return first && second && !same_values(first, second);
}

void IncomingTensors::each(c10::Device device,
                           const std::function<void(const at::Tensor&, const at::Tensor&)>& take) const {
  const c10::NoGradGuard no_grad;
  for (const auto& part : parts_) {
    if (part.shards) {
      take(part.announced, all_gather_sharded_tensor(*part.shards));
    } else {
      const at::Tensor& own = group().rank() == 0 ? part.values : part.announced;
      take(part.announced, broadcast_tensor(group(), own, device, "broadcast_state_dict"));
    }
  }
}

std::unique_ptr<IncomingTensors> plan_load(const StateDict& state_dict, comm::Group* group, const PlanLoad& plan) {
  auto incoming = group ? IncomingTensors::of_first_rank(state_dict, *group) : IncomingTensors::of_shards(state_dict);
  if (incoming) {
    comm::attempt_together(incoming->group(), [&] { plan(incoming->message(), incoming.get()); });
  } else {
    plan(state_dict, nullptr);
  }
  return incoming;
}

// Values that are here already are loaded at once. The announced tensors are received in the order of the message, and
// each is loaded into all its targets before the next one arrives, so that only one whole tensor is alive.
void load_copies(const std::vector<TensorCopy>& copies, const IncomingTensors* incoming, c10::Device device) {
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
