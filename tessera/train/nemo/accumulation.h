// What the parts of a model are told between the micro-batches of a step. Semantics of NeMo AutoModel's hooks.
//
//   MicrobatchFlags flags;                                    // one a rank
//   prepare_for_grad_accumulation(flags, {&model});
//   for (size_t i = 0; i < batches.size(); ++i) {
//     if (i + 1 == batches.size()) prepare_for_final_backward(flags, {&model});
//     loss(model, batches[i]).backward();
//     if (i == 0) prepare_after_first_microbatch(flags);
//   }
//
// All ranks must call alike. Flags belong to one rank, not to the process, whose threads may be several; layers that
// keep something from one micro-batch to the next (weights in float8) are given the flags or listen to them. No
// communication.
#pragma once

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera::train {

class MicrobatchFlags {
 public:
  // The backward that comes is followed by the optimizer's step.
  bool optim_step() const { return optim_step_; }
  // The micro-batch that comes is the first of its step, so that nothing of the parameters may be reused; unset before
  // the first step.
  std::optional<bool> first_microbatch() const { return first_microbatch_; }
  // Called after each of the functions below.
  void on_change(std::function<void(const MicrobatchFlags&)> listener) { listeners_.push_back(std::move(listener)); }
  void set(bool optim_step, std::optional<bool> first_microbatch);

 private:
  bool optim_step_ = false;
  std::optional<bool> first_microbatch_;
  std::vector<std::function<void(const MicrobatchFlags&)>> listeners_;
};

// A part that sees to itself derives from it.
struct AccumulationHooks {
  virtual ~AccumulationHooks() = default;
  virtual void prepare_for_grad_accumulation(bool pp_enabled) = 0;
  virtual void prepare_for_final_backward(bool pp_enabled) = 0;
};

// Before the first micro-batch: no step, first micro-batch. Then, unless a pipeline's schedule does it (pp_enabled), of
// each part: its own hook, or if it is fully sharded set_is_last_backward, set_reshard_after_backward and
// set_requires_gradient_sync false, so that gradients gather whole on this rank; other parts are left alone.
void prepare_for_grad_accumulation(MicrobatchFlags& flags, const std::vector<nn::Module*>& model_parts,
                                   bool pp_enabled = false);
// After the first micro-batch: what was kept of the parameters may be used again.
void prepare_after_first_microbatch(MicrobatchFlags& flags);
// Before the last backward: a step follows. Then as above, with true: gradients are reduced.
void prepare_for_final_backward(MicrobatchFlags& flags, const std::vector<nn::Module*>& model_parts,
                                bool pp_enabled = false);

}  // namespace tessera::train
