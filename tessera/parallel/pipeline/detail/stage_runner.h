// Runs forward and backward of micro-batches through one rank's stages, and holds the state between them.
//
// A stage's output is freed when the next stage has read it, because backward starts from the output's edge in the
// autograd graph. Between forward and backward of a micro-batch this object holds its input (a leaf), its graph, and on
// the last stage its loss. Belongs to one rank.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "tessera/kernels/autograd/weight_grad_store.h"
#include "tessera/models/adapters/adapters.h"
#include "tessera/models/decoder/causal_lm.h"

namespace tessera::pipeline::detail {

// How a forward is run.
struct ForwardOptions {
  double loss_divisor = 1;
  bool splits_backward = false;  // the actions I and W will follow
  // true: the gradient of the head's weight, which the fused loss computes in forward, is added to grad() of the
  // parameter directly after this forward. The option is set if other actions come between the forward and its
  // backward; otherwise each micro-batch in flight would hold such a gradient until its backward.
  bool accumulates_head_gradient = false;
};

class StageRunner {
 public:
  // micro_batches: all micro-batches of the step; adapter dropout needs their numbers of rows. The model must outlive
  // this object.
  StageRunner(CausalLM& model, const std::vector<ModelInputs>& micro_batches);
  ~StageRunner();
  StageRunner(const StageRunner&) = delete;
  StageRunner& operator=(const StageRunner&) = delete;

  // Runs the forward of a stage. hidden: the stage's input, undefined on the first stage. Returns the stage's output
  // without a graph. The last stage with labels returns an undefined tensor and keeps the loss; without labels it
  // returns the model's output (log-probs of targets, or logits). inputs.stage (ModelInputs::stage) is the stage to
  // run; nullopt: one stage is the whole model. COLLECTIVE over the groups in which the model's forward communicates.
  at::Tensor forward(int stage, int micro_batch, ModelInputs inputs, const at::Tensor& hidden,
                     const ForwardOptions& options);
  // Runs the backward of a stage. gradient: the gradient of the stage's output, undefined on the last stage. Returns
  // the gradient of the stage's input, undefined on the first stage. keep_weights: the gradients of linear weights are
  // deferred to weight_backward(). COLLECTIVE over the groups in which the model's backward communicates.
  at::Tensor backward(int stage, int micro_batch, const at::Tensor& gradient, bool keep_weights);
  void weight_backward(int stage, int micro_batch);

  // The sum of the losses whose backward has run (without gradients: whose forward has run), a float64 scalar on the
  // model's device; undefined: none.
  const at::Tensor& loss() const { return loss_; }
  int max_held() const { return max_held_; }

 private:
  struct PendingBackward {
    at::Tensor input{};              // a leaf
    torch::autograd::Edge output{};  // backward starts at this edge; invalid if no gradient is needed
    at::Tensor loss{};
    std::unique_ptr<kernels::WeightGradStore> weights{};
  };
  at::Tensor run_model(PendingBackward& pending, ModelInputs&& inputs, const ForwardOptions& options);
  void add_loss(const at::Tensor& loss);

  CausalLM& model_;
  std::shared_ptr<nn::LoraDropout> dropout_;  // null: no dropout
  std::map<std::pair<int, int>, PendingBackward> pending_;
  at::Tensor loss_;
  int max_held_ = 0;
};

}  // namespace tessera::pipeline::detail
