// Hooks of gradient accumulation: called between the micro-batches of a step, they set flags and switch the gradient
// reduction of model parts. Semantics of NeMo AutoModel's hooks.
//
//   MicrobatchFlags flags;                                    // one per rank
//   prepare_for_grad_accumulation(flags, {&model});
//   for (size_t i = 0; i < batches.size(); ++i) {
//     if (i + 1 == batches.size()) prepare_for_final_backward(flags, {&model});
//     loss(model, batches[i]).backward();
//     if (i == 0) prepare_after_first_microbatch(flags);
//   }
//
// All ranks must make the same calls in the same order. Flags belong to a rank and not to the process, because a
// process may run several ranks as threads. Layers that keep data from one micro-batch to the next (float8 weights)
// read the flags or register a listener. No communication.
#pragma once

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera::train {

class MicrobatchFlags {
 public:
  // Whether the optimizer steps after the next backward.
  bool optim_step() const { return optim_step_; }
  // Whether the next micro-batch is the first of its step, so that values derived from the parameters must be computed
  // again. Unset before the first step.
  std::optional<bool> first_microbatch() const { return first_microbatch_; }
  // Registers a listener. Every set() calls it after optim_step() and first_microbatch() have their new values.
  void on_change(std::function<void(const MicrobatchFlags&)> listener) { listeners_.push_back(std::move(listener)); }
  void set(bool optim_step, std::optional<bool> first_microbatch);

 private:
  bool optim_step_ = false;
  std::optional<bool> first_microbatch_;
  std::vector<std::function<void(const MicrobatchFlags&)>> listeners_;
};

// A model part that prepares itself for gradient accumulation derives from this struct. For such a part the functions
// prepare_for_grad_accumulation() and prepare_for_final_backward() below call the hook of the same name, and do not
// change the settings of fully_shard.
struct AccumulationHooks {
  virtual ~AccumulationHooks() = default;
  virtual void prepare_for_grad_accumulation(bool pp_enabled) = 0;
  virtual void prepare_for_final_backward(bool pp_enabled) = 0;
};

// Call before the first micro-batch. Sets the flags: optim_step false, first_microbatch true. Then prepares each model
// part, unless pp_enabled says that the schedule of a pipeline does this: calls the part's
// AccumulationHooks::prepare_for_grad_accumulation(), or for a fully sharded part without AccumulationHooks calls
// set_is_last_backward, set_reshard_after_backward and set_requires_gradient_sync with false, so that unsharded
// gradients accumulate on this rank. Other parts are not changed.
void prepare_for_grad_accumulation(MicrobatchFlags& flags, const std::vector<nn::Module*>& model_parts,
                                   bool pp_enabled = false);
// Call after the first micro-batch. Sets first_microbatch to false: listeners then know that values which they derived
// from the parameters in the first micro-batch (float8 weights, for example) are still valid.
void prepare_after_first_microbatch(MicrobatchFlags& flags);
// Call before the last backward. Sets optim_step to true. Then, unless pp_enabled, prepares each model part like
// prepare_for_grad_accumulation(), but calls the part's hook prepare_for_final_backward(), or for a fully sharded part
// calls set_is_last_backward, set_reshard_after_backward and set_requires_gradient_sync with true, so that the last
// backward reduces the gradients.
void prepare_for_final_backward(MicrobatchFlags& flags, const std::vector<nn::Module*>& model_parts,
                                bool pp_enabled = false);

}  // namespace tessera::train
