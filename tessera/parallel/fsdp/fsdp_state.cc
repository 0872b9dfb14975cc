#include "tessera/parallel/fsdp/fsdp_state.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/parallel/fsdp/prefetch_choice.h"

namespace tessera {

FsdpState::FsdpState(nn::Module& module, const FullyShardOptions& options, std::shared_ptr<FsdpParamGroup> group)
    : ShardingState(module, options.mp_policy, group),
      mesh_(options.mesh),
      reshard_after_forward_(options.reshard_after_forward),
      fixed_addresses_(options.fixed_addresses && !options.mesh->device().is_cpu()),
      group_(group.get()) {}

void FsdpState::set_reshard_after_forward(bool on) {
  reshard_after_forward_ = on;
  if (group_ != nullptr) group_->set_frees_after_forward(on);
}

void FsdpState::set_prefetch(bool on) {
  prefetch_ = on;
  if (schedule()) schedule()->set_prefetch(on);
}

bool FsdpState::init_root(const std::vector<NamedState>& states) {
  // Visits the states of all modules below the root. Collects the parameters on the meta device, for one error that
  // names all of them, and the distinct meshes, whose ranks must agree on prefetch. Gives groups with fixed_addresses
  // their buffers.
  std::string on_meta;
  std::vector<MeshPtr> meshes;
  std::shared_ptr<FixedAddressBuffers> buffers;
  for (const auto& [path, each] : states) {
    const auto& state = dynamic_cast<FsdpState&>(*each);
    const auto is_theirs = [&](const MeshPtr& mesh) { return *mesh == *state.mesh_; };
    if (std::ranges::none_of(meshes, is_theirs)) meshes.push_back(state.mesh_);
    if (state.group_ == nullptr) continue;
    if (state.fixed_addresses_) {
      if (!buffers) buffers = std::make_shared<FixedAddressBuffers>(state.mesh_->device());
      state.group_->set_frees_after_forward(state.reshards_after_forward(&state == this, /*backward_follows=*/true));
      state.group_->use_fixed_buffer(buffers);
    }
    for (const auto& param : state.group_->params()) {
      if (param.slots[0].get().parameter.is_meta()) {
        on_meta += (on_meta.empty() ? "" : ", ") + (path.empty() ? "" : path + ".") + param.name;
      }
    }
  }
  TESSERA_CHECK(on_meta.empty(), ErrorKind::kShape,
                "[fsdp.forward] parameters are still on the meta device: {}. Call to_empty(module, device) and "
                "initialise or load them before training.",
                on_meta);
  return agree_on_prefetch(*mesh_->world(), meshes, prefetch_);
}

// By default the parameters of the root are not freed after forward, because backward needs them first. If no backward
// follows, they are freed.
bool FsdpState::reshards_after_forward(bool is_root, bool backward_follows) const {
  return reshard_after_forward_.value_or(!is_root || !backward_follows);
}

}  // namespace tessera
