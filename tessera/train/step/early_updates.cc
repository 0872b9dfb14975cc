#include "tessera/train/step/early_updates.h"

#include <ATen/core/Tensor.h>

#include <utility>

#include "tessera/models/decoder/causal_lm.h"
#include "tessera/optim/optimizer.h"
#include "tessera/parallel/fsdp/fully_shard.h"

namespace tessera::train {

EarlyUpdates::EarlyUpdates(CausalLM& model, optim::Optimizer& optimizer)
    : model_(model), optimizer_(optimizer), norm_(model.parameters()) {
  set_gradients_hook(model_, [this](const std::vector<at::Tensor>& parameters) { update(parameters); });
}

EarlyUpdates::~EarlyUpdates() { set_gradients_hook(model_, {}); }

void EarlyUpdates::begin(double lr, std::function<void()> before_update) {
  optimizer_.set_lr(lr);
  before_update_ = std::move(before_update);
  updates_enabled_ = false;
}

void EarlyUpdates::enable_updates() {
  if (before_update_) before_update_();
  updates_enabled_ = true;
}

// Called by fully_shard after each reduction. Before enable_updates() the gradients are partial sums of the
// micro-batches so far and must stay. The norm is collected before the gradients are freed, as finish_step() cannot see
// them any more.
void EarlyUpdates::update(const std::vector<at::Tensor>& parameters) {
  if (!updates_enabled_) return;
  norm_.add(parameters);
  optimizer_.step_early(parameters);
  for (const auto& parameter : parameters) parameter.mutable_grad().reset();
}

at::Tensor EarlyUpdates::finish_step() {
  updates_enabled_ = false;
  return norm_.norm();
}

}  // namespace tessera::train
