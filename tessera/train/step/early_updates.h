// Optimizer updates during backward: the parameters of an FSDP group are updated as soon as their gradients have been
// reduced, and the gradients are then freed. Memory holds the gradients of one group instead of all groups. PyTorch
// does the same with hooks on single parameters ("fusing the optimizer step into the backward"). Clipping is not
// possible, because it needs the norm of all gradients before the first update. An EarlyUpdates belongs to one rank.
//
//   EarlyUpdates early(model, optimizer);
//   early.begin(lr, before_update);
//   pipeline.step(micro_batches, {.before_last_backward = [&] { early.enable_updates(); }});
//   at::Tensor norm = early.finish_step();      // COLLECTIVE over the meshes of the parameters
//   optimizer.step();                           // the parameters that were not updated yet
#pragma once

#include <ATen/core/TensorBase.h>

#include <functional>
#include <vector>

#include "tessera/optim/grad_norm.h"

namespace tessera {

class CausalLM;
}  // namespace tessera
namespace tessera::optim {
class Optimizer;
}

namespace tessera::train {

class EarlyUpdates {
 public:
  // `model` and `optimizer` must outlive the object. Error kShape when the model is not fully sharded.
  EarlyUpdates(CausalLM& model, optim::Optimizer& optimizer);
  ~EarlyUpdates();
  EarlyUpdates(const EarlyUpdates&) = delete;
  EarlyUpdates& operator=(const EarlyUpdates&) = delete;

  // Begins a step with its learning rate. `before_update` is called right before the first update of the step.
  void begin(double lr, std::function<void()> before_update);
  // Call before the backward of the last micro-batch: gradients that are reduced from here on are complete, and their
  // parameters are updated.
  void enable_updates();
  // The norm of all gradients of the step: of the parameters that were updated early, and of those that still have
  // their gradients. COLLECTIVE over the meshes of the parameters.
  at::Tensor finish_step();

 private:
  void update(const std::vector<at::Tensor>& parameters);
  CausalLM& model_;
  optim::Optimizer& optimizer_;
  optim::GradNormAccumulator norm_;
  std::function<void()> before_update_;
  bool updates_enabled_ = false;
};

}  // namespace tessera::train
