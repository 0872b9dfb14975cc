#include "tessera/parallel/pipeline/detail/stage_runner.h"

#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera::pipeline::detail {
namespace {

using kernels::WeightGradStore;

// Runs backward from an edge of the graph. Gradients accumulate in the leaves, as with Tensor::backward().
void run_graph(const torch::autograd::Edge& from, const at::Tensor& gradient) {
  torch::autograd::Engine::get_default_engine().execute({from}, {gradient}, /*keep_graph=*/false,
                                                        /*create_graph=*/false, /*accumulate_grad=*/true, {});
}

}  // namespace

StageRunner::StageRunner(CausalLM& model, const std::vector<ModelInputs>& micro_batches)
    : model_(model), dropout_(model.training() ? adapter_dropout(model) : nullptr) {
  if (!dropout_) return;
  std::vector<int64_t> rows;
  for (const auto& each : micro_batches) rows.push_back(each.tokens.size(0));
  dropout_->begin_step(rows);
}

StageRunner::~StageRunner() {
  if (dropout_) dropout_->end_step();
}

// Runs the model inside a WeightGradStore::Scope in two cases. With splits_backward, the store keeps what action W
// needs to compute the gradients of linear weights. With accumulates_head_gradient, the fused loss puts the gradient of
// the head's weight into the store during forward, divided by loss_divisor like the loss.
at::Tensor StageRunner::run_model(PendingBackward& pending, ModelInputs&& inputs, const ForwardOptions& options) {
  pending.weights = std::make_unique<WeightGradStore>();
  pending.weights->stores_weight_gradients = options.splits_backward;
  if (options.accumulates_head_gradient) pending.weights->loss_factor = 1 / options.loss_divisor;
  std::unique_ptr<WeightGradStore::Scope> scope;
  if (options.splits_backward || options.accumulates_head_gradient) {
    scope = std::make_unique<WeightGradStore::Scope>(pending.weights.get());
  }
  return model_(std::move(inputs));
}

// Adds the loss of a micro-batch to loss_. The sum stays on the device, and the host does not wait.
void StageRunner::add_loss(const at::Tensor& loss) {
  const c10::NoGradGuard no_grad;
  const auto own = (is_dtensor(loss) ? full_tensor(loss) : loss).detach().to(at::kDouble);
  loss_ = loss_.defined() ? loss_ + own : own;
}

at::Tensor StageRunner::forward(int stage, int micro_batch, ModelInputs inputs, const at::Tensor& hidden,
                                const ForwardOptions& options) {
  const bool is_last = !inputs.stage || inputs.stage->is_last;
  PendingBackward pending;
  if (hidden.defined()) {
    // The stage's input is made a leaf, so that backward of this stage ends at it and its grad() can be sent to the
    // stage before.
    pending.input = hidden.detach();
    if (c10::GradMode::is_enabled()) pending.input.set_requires_grad(true);
    inputs.hidden = pending.input;
  }
  if (!is_last) inputs.labels.reset(), inputs.targets.reset();
  if (dropout_) dropout_->select_micro_batch(micro_batch);
  const bool gives_result = is_last && !inputs.labels.defined();
  const auto output = run_model(pending, std::move(inputs), options);
  if (gives_result) return output.detach();
  // pending.loss, or pending.output (an edge of the graph), keeps the autograd graph alive. The output tensor itself is
  // not kept: it is freed when the next stage or the send has read it.
  at::Tensor output_value;
  if (is_last) {
    pending.loss = output / options.loss_divisor;
  } else {
    if (output.requires_grad()) pending.output = torch::autograd::impl::gradient_edge(output);
    output_value = output.detach();
  }
  if (!c10::GradMode::is_enabled()) {
    if (is_last) add_loss(pending.loss);
    return output_value;
  }
  pending.weights->flush();  // the gradient of the head's weight
  pending_.insert_or_assign({stage, micro_batch}, std::move(pending));
  max_held_ = std::max(max_held_, static_cast<int>(pending_.size()));
  return output_value;
}

// On the last stage, backward starts from the kept loss; on other stages, from the edge of the output with the received
// gradient. With keep_weights the entry of pending_ stays until weight_backward(), because it holds the deferred weight
// gradients.
at::Tensor StageRunner::backward(int stage, int micro_batch, const at::Tensor& gradient, bool keep_weights) {
  const auto found = pending_.find({stage, micro_batch});
  TESSERA_CHECK(found != pending_.end(), ErrorKind::kInternal,
                "[pipeline.backward] stage {}, micro-batch {}: found a backward without its forward", stage,
                micro_batch);
  auto& pending = found->second;
  if (dropout_) dropout_->select_micro_batch(micro_batch);  // recomputed modules must draw the same dropout
  {
    std::unique_ptr<WeightGradStore::Scope> scope;
    if (keep_weights) scope = std::make_unique<WeightGradStore::Scope>(pending.weights.get());
    if (pending.loss.defined()) {
      if (pending.loss.requires_grad()) pending.loss.backward();
      add_loss(pending.loss);
      pending.loss.reset();
    } else if (pending.output.is_valid()) {
      run_graph(std::exchange(pending.output, {}), gradient);
    }
  }
  at::Tensor input_gradient;
  if (pending.input.defined()) {
    // The stage before must receive a gradient of the announced shape, so a missing one is sent as zeros.
    input_gradient = pending.input.grad();
    if (!input_gradient.defined()) input_gradient = at::zeros_like(pending.input.detach());
    pending.input.reset();
  }
  if (!keep_weights) pending_.erase(found);
  return input_gradient;
}

void StageRunner::weight_backward(int stage, int micro_batch) {
  const auto found = pending_.find({stage, micro_batch});
  TESSERA_CHECK(found != pending_.end(), ErrorKind::kInternal,
                "[pipeline.backward] stage {}, micro-batch {}: found a weight backward (W) without its input backward "
                "(I)",
                stage, micro_batch);
  found->second.weights->flush();
  pending_.erase(found);
}

}  // namespace tessera::pipeline::detail
