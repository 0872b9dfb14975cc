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
  auto& tensors = incoming->tensors_;
  visit_tensors(incoming->message_, [&](const at::Tensor& tensor) {
    if (tensor.is_meta()) tensors.push_back({.announced = tensor});
  });
  incoming->index_tensors();
  if (group.rank() != 0) return incoming;
  size_t next = 0;  // index of the next tensor with dims, in the order in which they are announced
  visit_tensors(full, [&](const at::Tensor& tensor) {
    if (tensor.dim() > 0) tensors[next++].values = tensor;
  });
  return incoming;
}

std::unique_ptr<IncomingTensors> IncomingTensors::of_shards(const StateDict& state_dict) {
  if (!any_leaf(state_dict, can_be_gathered)) return nullptr;  // the usual case, before anything is copied
  auto incoming = std::make_unique<IncomingTensors>();
  incoming->message_ = state_dict;
  incoming->announce_shards(incoming->message_, "");
  auto& tensors = incoming->tensors_;
  if (tensors.empty()) return nullptr;
  // The tensors are sorted by path, so that all ranks all-gather them in the same order, whatever the insertion order
  // of their dicts is.
  std::ranges::sort(tensors, {}, &ReceivedTensor::path);
  incoming->group_ = tensors.front().shards->group.get();
  incoming->index_tensors();
  incoming->agree_on_shards();
  return incoming;
}

// For each ShardedTensor that has a process group: records it in tensors_ and replaces it in the dict by a meta tensor
// of its whole shape. The entry of tensors_ has this meta tensor as `announced`.
void IncomingTensors::announce_shards(StateDict& dict, const std::string& prefix) {
  for (auto& [key, value] : dict) {
    const auto path = prefix + to_string(key);
    if (value.is_dict()) announce_shards(value.dict(), path + ".");
    if (!can_be_gathered(value)) continue;
    const auto& sharded = value.sharded();
    const auto announced = at::empty(sharded->size, at::TensorOptions(sharded->dtype).device(c10::kMeta));
    tensors_.push_back({.announced = announced, .shards = sharded, .path = path});
    value = announced;
  }
}

// Each ShardedTensor is gathered by its own group, in the order of the paths. Ranks with different paths, shapes or
// groups would call different collectives and hang, so the lists are compared first.
void IncomingTensors::agree_on_shards() const {
  comm::NamedValues facts;
  for (const auto& incoming : tensors_) {
    facts.emplace_back(
        incoming.path,
        fmt::format("a ShardedTensor of {} [{}] over ranks {}", c10::toString(incoming.shards->dtype),
                    fmt::join(incoming.shards->size, ", "), fmt::join(incoming.shards->group->ranks(), ",")));
  }
  check_equal_on_ranks(group(), facts, "Load on each rank the dict that was saved on it.");
}

void IncomingTensors::index_tensors() {
  for (size_t i = 0; i < tensors_.size(); ++i) position_.emplace(tensors_[i].announced.unsafeGetTensorImpl(), i);
}

bool IncomingTensors::are_known_to_differ(const at::Tensor& a, const at::Tensor& b) const {
  const auto &first = tensors_[position_.at(a.unsafeGetTensorImpl())].shards,
             &second = tensors_[position_.at(b.unsafeGetTensorImpl())].shards;
  return first && second && !same_values(first, second);
}

void IncomingTensors::receive_each(c10::Device device,
                                   const std::function<void(const at::Tensor&, const at::Tensor&)>& take) const {
  const c10::NoGradGuard no_grad;
  for (const auto& incoming : tensors_) {
    if (incoming.shards) {
      take(incoming.announced, all_gather_sharded_tensor(*incoming.shards));
    } else {
      const at::Tensor& own = group().rank() == 0 ? incoming.values : incoming.announced;
      take(incoming.announced, broadcast_tensor(group(), own, device, "broadcast_state_dict"));
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

// Sources that are not announced tensors (IncomingTensors) have their values on this rank; they are loaded first. Then
// the values of the announced tensors are received from other ranks, in the order of message(). The values of one
// tensor are loaded into all its targets before the next ones are received, so that at most one received whole tensor
// is in memory.
void load_copies(const std::vector<TensorCopy>& copies, const IncomingTensors* incoming, c10::Device device) {
  std::unordered_map<const c10::TensorImpl*, std::vector<at::Tensor>> awaited;
  for (const auto& copy : copies) {
    if (incoming && incoming->is_announced(copy.source)) {
      awaited[copy.source.unsafeGetTensorImpl()].push_back(copy.target);
    } else {
      load_tensor(copy.target, copy.source);
    }
  }
  if (!incoming) return;
  incoming->receive_each(device, [&](const at::Tensor& announced, const at::Tensor& values) {
    const auto found = awaited.find(announced.unsafeGetTensorImpl());
    if (found == awaited.end()) return;
    for (const auto& target : found->second) load_tensor(target, values);
  });
}

}  // namespace tessera::detail
