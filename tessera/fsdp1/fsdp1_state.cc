#include "tessera/fsdp1/fsdp1_state.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "tessera/mesh/device_stream.h"

namespace tessera {

Fsdp1State::Fsdp1State(nn::Module& module, ShardingStrategy strategy, MixedPrecision precision,
                       std::shared_ptr<FlatParamGroup> group)
    : ShardingState(module, {}, group),
      wrapped_(module),
      strategy_(strategy),
      precision_(precision),
      group_(std::move(group)) {
  if (!precision_.param_dtype) return;
  // cast_inputs() runs before the hooks of ShardingState. It first finishes the pending set-up, which finds out whether
  // this unit is the root.
  module.register_forward_pre_hook([this](nn::Module&, nn::TensorRefs& inputs) { cast_inputs(inputs); });
}

void Fsdp1State::cast_inputs(const nn::TensorRefs& inputs) {
  lazy_init();
  const bool casts = (is_root_ && precision_.cast_root_forward_inputs) || (group_ && precision_.cast_forward_inputs);
  if (casts) cast_floating(inputs, *precision_.param_dtype);
}

// Casts the buffers to MixedPrecision::buffer_dtype. Returns whether all-gathers can be prefetched, which is so when
// some unit is on a device with streams. Inner units are visited first, because a buffer follows the settings of the
// innermost unit around it; `visited` prevents outer units from casting the buffer again.
bool Fsdp1State::init_root(const std::vector<NamedState>& states) {
  is_root_ = true;
  std::unordered_set<const at::Tensor*> visited;
  for (auto each = states.rbegin(); each != states.rend(); ++each) {
    if (auto* state = dynamic_cast<Fsdp1State*>(each->second)) state->cast_buffers(visited);
  }
  return std::ranges::any_of(states, [](const NamedState& each) {
    const auto* group = each.second->param_group();
    return group != nullptr && has_streams(group->device());
  });
}

void Fsdp1State::cast_buffers(std::unordered_set<const at::Tensor*>& visited) {
  const c10::NoGradGuard no_grad;
  for (const auto& [path, module] : wrapped_.named_modules()) {
    for (auto& buffer : module->own_buffers()) {
      if (!visited.insert(buffer.slot).second || !precision_.buffer_dtype) continue;
      if (!buffer.slot->defined() || !buffer.slot->is_floating_point()) continue;
      buffer_dtypes_.emplace(buffer.slot, buffer.slot->scalar_type());
      *buffer.slot = buffer.slot->to(*precision_.buffer_dtype);
    }
  }
}

}  // namespace tessera
