// The autograd node of a group: one for each forward, sharded parameters in, unsharded parameters out.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace tessera::parallel {

// Gets the gradients of the unsharded parameters, undefined where there was none.
using GradientSink = std::function<void(std::vector<at::Tensor>&& gradients)>;

// Makes `whole` results of a graph node that depends on `shards`. Backward hands all its gradients to `sink` at once and
// passes nothing on: the sink sets the shards' gradients itself.
void connect_gradients(const std::vector<at::Tensor>& shards, const std::vector<at::Tensor>& whole, GradientSink sink);

// Calls `hook` when the gradient of `output` is known and its graph is about to run backward.
void before_backward_of(const at::Tensor& output, std::function<void()> hook);
// Runs `callback` when the running backward ends; it must be called inside one.
void at_end_of_backward(std::function<void()> callback);
// Whether this thread is inside a backward.
bool inside_backward();

}  // namespace tessera::parallel
