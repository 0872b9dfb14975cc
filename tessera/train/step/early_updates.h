// Updates during backward: the parameters of a group as soon as their gradients have been reduced, which are freed
// then, so that gradients of one group lie there at a time instead of those of all. What PyTorch does with hooks on
// parameters ("fusing the optimizer step into the backward"), for fully_shard's groups. Clipping, which needs the norm
// of all gradients first, has no place here. Belongs to one rank.
//
//   EarlyUpdates early(model, optimizer);
//   early.begin(lr, before_update);
//   pipeline.step(micro_batches, {.before_last_backward = [&] { early.open(); }});
//   at::Tensor norm = early.end();              // COLLECTIVE over the meshes of the parameters
//   optimizer.step();                           // what was not updated yet
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
  // Both outlive it. Error kShape when the model is not fully sharded.
  EarlyUpdates(CausalLM& model, optim::Optimizer& optimizer);
  ~EarlyUpdates();
  EarlyUpdates(const EarlyUpdates&) = delete;
  EarlyUpdates& operator=(const EarlyUpdates&) = delete;

  // Of a step: its learning rate, and what is called right before its first update.
  void begin(double lr, std::function<void()> before_update);
  // From here on gradients are whole when they are handed to a group.
  void open();
  // The norm of all gradients of the step, those that are there still included. COLLECTIVE.
  at::Tensor end();

 private:
  void update(const std::vector<at::Tensor>& parameters);
  CausalLM& model_;
  optim::Optimizer& optimizer_;
  optim::GradNormInParts norm_;
  std::function<void()> before_update_;
  bool open_ = false;
};

}  // namespace tessera::train
