#include "tessera/parallel/pipeline/detail/stage_runs.h"

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

StageRuns::StageRuns(CausalLM& model, const std::vector<ModelInputs>& micro_batches)
    : model_(model), dropout_(model.training() ? adapter_dropout(model) : nullptr) {
  if (!dropout_) return;
  std::vector<int64_t> rows;
  for (const auto& each : micro_batches) rows.push_back(each.tokens.size(0));
  dropout_->begin_step(rows);
}

StageRuns::~StageRuns() {
  if (dropout_) dropout_->end_step();
}

// Runs the model inside a scope of deferred gradients in two cases. If the backward is split, its action I defers the
// gradients of linear weights to its action W. If the head's gradient goes to its parameter at once, the fused loss
// defers it during forward, scaled like the loss that backward would start from.
at::Tensor StageRuns::run_model(Run& run, ModelInputs&& inputs, const ForwardHow& how) {
  run.weights = std::make_unique<WeightGradStore>();
  run.weights->stores_weight_gradients = how.splits_backward;
  if (how.hands_on_head) run.weights->loss_factor = 1 / how.loss_divisor;
  std::unique_ptr<WeightGradStore::Scope> scope;
  if (how.splits_backward || how.hands_on_head) scope = std::make_unique<WeightGradStore::Scope>(run.weights.get());
  return model_(std::move(inputs));
}

// Adds a loss on the device; the host does not wait.
void StageRuns::add_loss(const at::Tensor& loss) {
  const c10::NoGradGuard no_grad;
  const auto own = (is_dtensor(loss) ? full_tensor(loss) : loss).detach().to(at::kDouble);
  loss_ = loss_.defined() ? loss_ + own : own;
}

at::Tensor StageRuns::forward(int stage, int micro_batch, ModelInputs inputs, const at::Tensor& hidden,
                              const ForwardHow& how) {
  const bool is_last = !inputs.stage || inputs.stage->is_last;
  Run run;
  if (hidden.defined()) {
    // The input is a leaf, so backward of this stage ends here and its gradient can be sent.
    run.input = hidden.detach();
    if (c10::GradMode::is_enabled()) run.input.set_requires_grad(true);
    inputs.hidden = run.input;
  }
  if (!is_last) inputs.labels.reset(), inputs.targets.reset();
  if (dropout_) dropout_->enter(micro_batch);
  const bool gives_result = is_last && !inputs.labels.defined();
  const auto output = run_model(run, std::move(inputs), how);
  if (gives_result) return output.detach();
  // The graph is kept through the loss, or through the edge of the output. The output tensor itself is not kept: it is
  // freed when the next stage or the send has read it.
  at::Tensor given;
  if (is_last) {
    run.loss = output / how.loss_divisor;
  } else {
    if (output.requires_grad()) run.output = torch::autograd::impl::gradient_edge(output);
    given = output.detach();
  }
  if (!c10::GradMode::is_enabled()) {
    if (is_last) add_loss(run.loss);
    return given;
  }
  run.weights->flush();  // the gradient of the head's weight
  runs_.insert_or_assign({stage, micro_batch}, std::move(run));
  most_held_ = std::max(most_held_, static_cast<int>(runs_.size()));
  return given;
}

// Starts from the kept loss on the last stage, else from the edge of the output with the received gradient. With
// keep_weights the run stays until weight_backward, because it holds the deferred gradients.
at::Tensor StageRuns::backward(int stage, int micro_batch, const at::Tensor& gradient, bool keep_weights) {
  const auto found = runs_.find({stage, micro_batch});
  TESSERA_CHECK(found != runs_.end(), ErrorKind::kInternal,
                "[pipeline.backward] stage {}, micro-batch {}: found a backward without its forward", stage,
                micro_batch);
  auto& run = found->second;
  if (dropout_) dropout_->enter(micro_batch);  // recomputed modules must draw the same dropout
  {
    std::unique_ptr<WeightGradStore::Scope> scope;
    if (keep_weights) scope = std::make_unique<WeightGradStore::Scope>(run.weights.get());
    if (run.loss.defined()) {
      if (run.loss.requires_grad()) run.loss.backward();
      add_loss(run.loss);
      run.loss.reset();
    } else if (run.output.is_valid()) {
      run_graph(std::exchange(run.output, {}), gradient);
    }
  }
  at::Tensor input_gradient;
  if (run.input.defined()) {
    // The stage before must receive a gradient of the announced shape, so a missing one is sent as zeros.
    input_gradient = run.input.grad();
    if (!input_gradient.defined()) input_gradient = at::zeros_like(run.input.detach());
    run.input.reset();
  }
  if (!keep_weights) runs_.erase(found);
  return input_gradient;
}

void StageRuns::weight_backward(int stage, int micro_batch) {
  const auto found = runs_.find({stage, micro_batch});
  TESSERA_CHECK(found != runs_.end(), ErrorKind::kInternal,
                "[pipeline.backward] stage {}, micro-batch {}: found a weight backward (W) without its input backward "
                "(I)",
                stage, micro_batch);
  found->second.weights->flush();
  runs_.erase(found);
}

}  // namespace tessera::pipeline::detail
