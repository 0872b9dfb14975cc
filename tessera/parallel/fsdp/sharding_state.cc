#include "tessera/parallel/fsdp/sharding_state.h"

#include <c10/core/GradMode.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/parallel/data_parallel/gradient_nodes.h"

namespace tessera {

ShardingState::ShardingState(nn::Module& module, MixedPrecisionPolicy policy, std::shared_ptr<ShardedParamGroup> group)
    : module_(module), policy_(policy), group_(std::move(group)) {}

void ShardingState::install_hooks() {
  module_.register_forward_pre_hook([this](nn::Module&, nn::TensorRefs& inputs) { before_forward(inputs); });
  module_.register_forward_hook([this](nn::Module&, nn::TensorRefs& outputs) { after_forward(outputs); });
}

void ShardingState::set_synchronize(bool on) {
  if (group_) group_->synchronize = on;
}

void ShardingState::set_gradient_divisor(double factor) {
  if (group_) group_->divide = factor;
}

void ShardingState::set_reshard_after_backward(bool on) {
  if (group_) group_->reshard_after_backward = on;
}

void ShardingState::set_is_last_backward(bool on) {
  is_last_backward_ = on;
  if (schedule_) schedule_->set_is_last_backward(on);
}

// The first module whose forward runs becomes the root of all sharded modules below it, and they all share its
// FsdpCommSchedule. If a module below it has a schedule_ already, the forward of that module ran before and made that
// module a root. That is an error, because one FsdpCommSchedule must decide the order of all gathers.
void ShardingState::lazy_init() {
  if (schedule_) return;
  std::vector<NamedState> states;
  for (const auto& [path, module] : module_.named_modules()) {
    auto* state = dynamic_cast<ShardingState*>(module->sharding().get());
    if (state == nullptr) continue;
    TESSERA_CHECK(!state->schedule_, ErrorKind::kShape,
                  "[fsdp.forward] '{}': its forward ran before that of the root above it. Run forward through the root "
                  "module first.",
                  path);
    states.emplace_back(path, state);
  }
  auto schedule = std::make_shared<FsdpCommSchedule>(init_root(states));
  schedule->set_is_last_backward(
      std::ranges::all_of(states, [](const NamedState& each) { return each.second->is_last_backward_; }));
  for (const auto& [path, state] : states) {
    state->schedule_ = schedule;
    if (!state->group_) continue;
    state->group_->set_name(path.empty() ? "root" : path);
    schedule->add(state->group_);
  }
  root_ = true;
}

// Returns the tensors that forward reads. The tensors that need gradients are outputs of one autograd node, which
// receives all gradients of the group in one call.
std::vector<at::Tensor> ShardingState::unsharded_parameters() {
  auto whole = group_->unsharded_tensors();
  const auto trainable = c10::GradMode::is_enabled() ? group_->trainable() : std::vector<size_t>{};
  if (trainable.empty()) return whole;
  std::vector<at::Tensor> outputs;
  for (size_t index : trainable) outputs.push_back(whole[index]);
  attach_gradient_node(group_->leaves(trainable), outputs,
                       [self = shared_from_this(), trainable](std::vector<at::Tensor>&& gradients) {
                         self->group_->accumulate(trainable, std::move(gradients));
                         self->schedule_->after_backward(*self->group_);
                       });
  return whole;
}

// Detects the end of backward for a group without trainable parameters: no parameter gets a gradient, so the group is
// freed when the gradients of all inputs of the module have been computed.
void ShardingState::watch_inputs(const nn::TensorRefs& inputs) {
  if (!c10::GradMode::is_enabled() || !group_->trainable().empty()) return;
  std::vector<at::Tensor*> watched;
  for (at::Tensor* input : inputs) {
    if (input->defined() && input->requires_grad()) watched.push_back(input);
  }
  auto missing = std::make_shared<size_t>(watched.size());
  for (at::Tensor* input : watched) {
    *input = input->view_as(*input);  // a new node, which runs before the hooks of the node that made the input
    on_gradient_of(*input, [self = shared_from_this(), missing, count = watched.size()] {
      if (--*missing > 0) return;
      *missing = count;
      self->schedule_->after_backward(*self->group_);
    });
  }
}

void ShardingState::before_forward(nn::TensorRefs& inputs) {
  lazy_init();
  if (root_) schedule_->begin_forward();
  if (policy_.param_dtype && policy_.cast_forward_inputs) cast_floating(inputs, *policy_.param_dtype);
  if (!group_) return;
  watch_inputs(inputs);
  schedule_->before_forward(*group_);
  group_->use_unsharded_params(unsharded_parameters());
}

void ShardingState::after_forward(nn::TensorRefs& outputs) {
  // A backward can follow if some output requires a gradient. Hooks on all outputs then gather the group again when the
  // first gradient of an output has been computed.
  bool backward_follows = false;
  for (at::Tensor* output : outputs) {
    backward_follows =
        backward_follows || (c10::GradMode::is_enabled() && output->defined() && output->requires_grad());
  }
  if (backward_follows) {
    auto record = std::make_shared<ForwardRecord>(schedule_->after_forward(group_.get()));
    for (at::Tensor* output : outputs) {
      if (!output->defined() || !output->requires_grad()) continue;
      on_gradient_of(*output, [self = shared_from_this(), record] {
        self->schedule_->before_backward(self->group_.get(), *record);
      });
    }
  }
  if (group_) {
    group_->use_sharded_params();
    if (!schedule_->recomputing() && reshards_after_forward(root_, backward_follows)) group_->reshard();
  }
  if (policy_.output_dtype) cast_floating(outputs, *policy_.output_dtype);
  if (root_) schedule_->end_forward();
}

}  // namespace tessera
