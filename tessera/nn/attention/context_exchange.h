// How keys and values come to the rank whose queries see them, and how their gradients go home. Internal to nn.
//
//   const auto exchange = make_exchange(pattern, kv);                     // kv [2, B, G, T, d] of this rank's tokens
//   for (size_t step = 0; step < pattern.steps.size(); ++step) {
//     at::Tensor brought = exchange->take(step);                          // [2, B, G, keys of the step, d]
//     exchange->give_back(step, gradient_of_brought);                     // backward only
//   }
//   at::Tensor gradient = exchange->finish();                             // [2, B, G, T, d]
//
// COLLECTIVE over the pattern's group: all its ranks take (and give back) all steps, in order.
#pragma once

#include <memory>

#include "tessera/nn/attention/context_attention.h"

namespace tessera::nn {

class KeyExchange {
 public:
  virtual ~KeyExchange() = default;
  // Undefined where the step brings nothing. Starts to bring the next one.
  virtual at::Tensor take(size_t step) = 0;
  // Undefined where the step brought nothing, which step 0 of kAllToAll, this rank's own keys, never does.
  virtual void give_back(size_t step, const at::Tensor& gradient) = 0;
  virtual at::Tensor finish() = 0;
};

std::unique_ptr<KeyExchange> make_exchange(const ContextPattern& pattern, const at::Tensor& kv);

}  // namespace tessera::nn
