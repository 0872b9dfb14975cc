#include "tessera/state/detail/sharded_values.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "tessera/state/broadcast_state.h"
#include "tessera/state/state_dict_structure.h"

namespace tessera::detail {
namespace {

bool can_be_gathered(const StateValue& value) {
  return value.is_sharded() && value.sharded() && value.sharded()->group;
}

}  // namespace

std::unique_ptr<ShardedValues> ShardedValues::of(const StateDict& state_dict) {
  if (!any_leaf(state_dict, can_be_gathered)) return nullptr;  // the usual case, before anything is copied
  auto values = std::make_unique<ShardedValues>();
  values->message_ = state_dict;
  values->announce(values->message_, "");
  if (values->parts_.empty()) return nullptr;
  std::ranges::sort(values->parts_, {}, &Part::path);
  for (size_t i = 0; i < values->parts_.size(); ++i) {
    values->position_.emplace(values->parts_[i].announced.unsafeGetTensorImpl(), i);
  }
  values->agree();
  return values;
}

void ShardedValues::announce(StateDict& dict, const std::string& prefix) {
  for (auto& [key, value] : dict) {
    const auto path = prefix + to_string(key);
    if (value.is_dict()) announce(value.dict(), path + ".");
    if (!can_be_gathered(value)) continue;
    const auto& sharded = value.sharded();
    const auto announced = at::empty(sharded->size, at::TensorOptions(sharded->dtype).device(c10::kMeta));
    parts_.push_back({path, announced, sharded});
    value = announced;
  }
}

// Each is gathered by its own group, in the order of the paths.
void ShardedValues::agree() const {
  comm::Facts facts;
  for (const auto& part : parts_) {
    facts.emplace_back(part.path,
                       fmt::format("a ShardedTensor of {} [{}] over ranks {}", c10::toString(part.value->dtype),
                                   fmt::join(part.value->size, ", "), fmt::join(part.value->group->ranks(), ",")));
  }
  check_alike(group(), facts, "Load on each rank the dict that was saved on it.");
}

bool ShardedValues::are_known_to_differ(const at::Tensor& a, const at::Tensor& b) const {
  const auto first = position_.find(a.unsafeGetTensorImpl()), second = position_.find(b.unsafeGetTensorImpl());
  if (first == position_.end() || second == position_.end()) return false;
  return !same_values(parts_[first->second].value, parts_[second->second].value);
}

void ShardedValues::each(c10::Device, const std::function<void(const at::Tensor&, const at::Tensor&)>& take) {
  const c10::NoGradGuard no_grad;
  for (const auto& part : parts_) take(part.announced, all_gather_sharded_tensor(*part.value));
}

}  // namespace tessera::detail
