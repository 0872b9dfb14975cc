#include "tessera/parallel/detail/fsdp_state.h"

#include <c10/core/GradMode.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/parallel/detail/group_node.h"
#include "tessera/parallel/detail/prefetch_choice.h"

namespace tessera::parallel {

FsdpState::FsdpState(nn::Module& module, const FullyShardOptions& options, std::shared_ptr<ParamGroup> group)
    : module_(module),
      mesh_(options.mesh),
      policy_(options.mp_policy),
      reshard_after_forward_(options.reshard_after_forward),
      group_(std::move(group)) {}

void FsdpState::install_hooks() {
  module_.register_forward_pre_hook([this](nn::Module&, nn::TensorRefs& inputs) { before_forward(inputs); });
  module_.register_forward_hook([this](nn::Module&, nn::TensorRefs& outputs) { after_forward(outputs); });
}

void FsdpState::set_prefetch(bool on) {
  prefetch_ = on;
  if (schedule_) schedule_->set_prefetch(on);
}

void FsdpState::set_synchronize(bool on) {
  if (group_) group_->synchronize = on;
}

void FsdpState::set_divide(double factor) {
  if (group_) group_->divide = factor;
}

void FsdpState::settle() {
  if (schedule_) return;
  std::string on_meta;
  std::vector<MeshPtr> meshes;
  for (const auto& [path, module] : module_.named_modules()) {
    FsdpState* state = fsdp_state(*module);
    if (state == nullptr) continue;
    const auto is_theirs = [&](const MeshPtr& mesh) { return *mesh == *state->mesh_; };
    if (std::none_of(meshes.begin(), meshes.end(), is_theirs)) meshes.push_back(state->mesh_);
    TESSERA_CHECK(!state->schedule_, ErrorKind::kShape,
                  "[fsdp.forward] '{}': its forward ran before that of the root above it. Run forward through the root "
                  "module first.",
                  path);
    if (!state->group_) continue;
    for (const auto& param : state->group_->params()) {
      if (param.slots[0].get().parameter.is_meta())
        on_meta += (on_meta.empty() ? "" : ", ") + (path.empty() ? "" : path + ".") + param.name;
    }
  }
  TESSERA_CHECK(on_meta.empty(), ErrorKind::kShape,
                "[fsdp.forward] parameters are still on the meta device: {}. Call to_empty(module, device) and "
                "initialise or load them before training.",
                on_meta);
  const bool prefetch = agree_on_prefetch(*mesh_->world(), meshes, prefetch_);
  auto schedule = std::make_shared<GatherSchedule>(prefetch);
  for (const auto& [path, module] : module_.named_modules()) {
    FsdpState* state = fsdp_state(*module);
    if (state == nullptr) continue;
    state->schedule_ = schedule;
    if (!state->group_) continue;
    state->group_->set_name(path.empty() ? "root" : path);
    schedule->add(state->group_);
  }
  root_ = true;
}

// What forward reads, connected to the gradients of the shards.
std::vector<at::Tensor> FsdpState::whole_parameters() {
  auto whole = group_->whole_tensors();
  const auto trainable = c10::GradMode::is_enabled() ? group_->shards().trainable() : std::vector<size_t>{};
  if (trainable.empty()) return whole;
  std::vector<at::Tensor> shards, outputs;
  for (size_t index : trainable) {
    shards.push_back(group_->params()[index].parameter);
    outputs.push_back(whole[index]);
  }
  connect_gradients(shards, outputs, [self = shared_from_this(), trainable](std::vector<at::Tensor>&& gradients) {
    auto& group = *self->group_;
    group.reducer().accumulate(group.params(), trainable, std::move(gradients), group.name());
    self->schedule_->after_backward(group);
  });
  return whole;
}

// A group without trainable parameters has no gradients to tell when its backward is over: those of its inputs do.
void FsdpState::watch_inputs(const nn::TensorRefs& inputs) {
  if (!c10::GradMode::is_enabled() || !group_->shards().trainable().empty()) return;
  std::vector<at::Tensor*> watched;
  for (at::Tensor* input : inputs) {
    if (input->defined() && input->requires_grad()) watched.push_back(input);
  }
  auto missing = std::make_shared<size_t>(watched.size());
  for (at::Tensor* input : watched) {
    *input = input->view_as(*input);  // a node of its own, that runs before the hooks of what made the input
    before_backward_of(*input, [self = shared_from_this(), missing, count = watched.size()] {
      if (--*missing > 0) return;
      *missing = count;
      self->schedule_->after_backward(*self->group_);
    });
  }
}

void FsdpState::before_forward(nn::TensorRefs& inputs) {
  settle();
  if (root_) schedule_->begin_forward();
  if (policy_.param_dtype && policy_.cast_forward_inputs) cast_floating(inputs, *policy_.param_dtype);
  if (!group_) return;
  watch_inputs(inputs);
  schedule_->before_forward(*group_);
  group_->show_whole(whole_parameters());
}

void FsdpState::after_forward(nn::TensorRefs& outputs) {
  bool backward_follows = false;
  for (at::Tensor* output : outputs) {
    backward_follows =
        backward_follows || (c10::GradMode::is_enabled() && output->defined() && output->requires_grad());
  }
  if (backward_follows) {
    auto run = std::make_shared<ForwardRun>(schedule_->after_forward(group_.get()));
    for (at::Tensor* output : outputs) {
      if (!output->defined() || !output->requires_grad()) continue;
      before_backward_of(
          *output, [self = shared_from_this(), run] { self->schedule_->before_backward(self->group_.get(), *run); });
    }
  }
  if (group_) {
    group_->show_shards();
    // Without a backward to come even the root has no reason to stay.
    const bool by_default = !root_ || !backward_follows;
    if (!schedule_->recomputing() && reshard_after_forward_.value_or(by_default)) group_->reshard();
  }
  if (policy_.output_dtype) cast_floating(outputs, *policy_.output_dtype);
  if (root_) schedule_->end_forward();
}

FsdpState* fsdp_state(const nn::Module& module) { return dynamic_cast<FsdpState*>(module.sharding().get()); }

std::vector<FsdpState*> fsdp_states(nn::Module& module) {
  std::vector<FsdpState*> out;
  for (const auto& [path, child] : module.named_modules()) {
    if (auto* state = fsdp_state(*child)) out.push_back(state);
  }
  return out;
}

}  // namespace tessera::parallel
