// Forward and backward of micro-batches through one rank's stages, and what is held in between.
//
// What a stage gave is let go once the next stage has it: backward starts from its place in the graph. Of a micro-batch
// are held its input (a leaf), its graph, and the loss on the last stage. Belongs to one rank.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "tessera/kernels/autograd/deferred_gradients.h"
#include "tessera/models/adapters/adapters.h"
#include "tessera/models/decoder/causal_lm.h"

namespace tessera::pipeline::detail {

struct ForwardHow {
  double loss_divisor = 1;
  bool splits_backward = false;  // I and W will follow
  // The gradient of the head goes to its parameter in forward already, for backward is not next.
  bool hands_on_head = false;
};

class StageRuns {
 public:
  // Of these micro-batches.
  StageRuns(CausalLM& model, const std::vector<ModelInputs>& micro_batches);
  ~StageRuns();
  StageRuns(const StageRuns&) = delete;
  StageRuns& operator=(const StageRuns&) = delete;

  // hidden: undefined on the first stage. What the stage gives, without graph; of the last one, where labels are
  // not defined, what the model makes of the rest (log-probs of targets, logits), else nothing, and its loss is kept.
  // inputs.stage: none where one stage is all. COLLECTIVE as the model.
  at::Tensor forward(int stage, int micro_batch, ModelInputs inputs, const at::Tensor& hidden, const ForwardHow& how);
  // gradient: of what the stage gave; undefined of the last one. Gives that of its input, undefined of the first one.
  // keep_weights: those of linear weights wait for weight_backward. COLLECTIVE as the model.
  at::Tensor backward(int stage, int micro_batch, const at::Tensor& gradient, bool keep_weights);
  void weight_backward(int stage, int micro_batch);

  // The sum of those that went backward: a float64 scalar where the model computes; undefined: none did.
  const at::Tensor& loss() const { return loss_; }
  int most_held() const { return most_held_; }

 private:
  struct Run {
    at::Tensor input{};              // a leaf
    torch::autograd::Edge output{};  // where backward starts; without function: nothing here needs it
    at::Tensor loss{};
    std::unique_ptr<kernels::DeferredGradients> weights{};
  };
  at::Tensor run_model(Run& run, ModelInputs&& inputs, const ForwardHow& how);
  void add_loss(const at::Tensor& loss);

  CausalLM& model_;
  std::shared_ptr<nn::LoraDropout> dropout_;  // null: nothing is dropped
  std::map<std::pair<int, int>, Run> runs_;
  at::Tensor loss_;
  int most_held_ = 0;
};

}  // namespace tessera::pipeline::detail
