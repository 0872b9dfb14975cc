// Sends keys and values to the ranks whose queries see them, and their gradients back to the owners. Internal to nn.
//
//   const auto exchange = make_exchange(pattern, kv);                     // kv [2, B, G, T, d] of this rank's tokens
//   for (size_t step = 0; step < pattern.steps.size(); ++step) {
//     at::Tensor received = exchange->receive_step(step);                 // [2, B, G, keys of the step, d]
//     exchange->return_gradient(step, gradient_of_received);              // backward only
//   }
//   at::Tensor gradient = exchange->finish();                             // [2, B, G, T, d]
//
// COLLECTIVE over the pattern's group: all ranks call receive_step() (and return_gradient()) for all steps, in order.
#pragma once

#include <memory>

#include "tessera/nn/attention/context_attention.h"

namespace tessera::nn {

class KeyValueExchange {
 public:
  virtual ~KeyValueExchange() = default;
  // Returns the keys and values that this rank needs in step `step`, or an undefined tensor if it needs none in this
  // step. Starts the transfer of the keys and values of the next step, if there is one.
  virtual at::Tensor receive_step(size_t step) = 0;
  // Sends the gradient of a step's keys and values to the rank that owns them. `gradient` is undefined if
  // receive_step() returned an undefined tensor. At step 0 of kAllToAll, the keys are this rank's own keys and
  // `gradient` is always defined.
  virtual void return_gradient(size_t step, const at::Tensor& gradient) = 0;
  // Waits for the transfers that return_gradient() started. Returns the gradient of `kv` (this rank's keys and values),
  // summed over all ranks that used these keys and values.
  virtual at::Tensor finish() = 0;
};

std::unique_ptr<KeyValueExchange> make_exchange(const ContextPattern& pattern, const at::Tensor& kv);

}  // namespace tessera::nn
