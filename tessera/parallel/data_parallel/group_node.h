// The autograd nodes behind data parallelism: one for each forward of a sharded group, and ends of the graph that take
// the place of leaves.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <unordered_set>
#include <vector>

#include "tessera/parallel/data_parallel/make_node.h"

namespace tessera {

// Gets the gradients of the unsharded parameters, undefined where there was none.
using GradientSink = std::function<void(std::vector<at::Tensor>&& gradients)>;

// Makes `whole` results of a graph node that depends on `shards`. Backward hands all its gradients to `sink` at once
// and passes nothing on: the sink sets the shards' gradients itself.
void connect_gradients(const std::vector<at::Tensor>& shards, const std::vector<at::Tensor>& whole, GradientSink sink);

// An end of the graph in place of several leaves: forward reads tensors connected to it, each backward hands it all
// their gradients at once, however many forwards came before. It runs as soon as they are complete, as leaves do, and
// like them once for each graph inside reentrant checkpoints.
class GraphEnd {
 public:
  GraphEnd(const std::vector<at::Tensor>& like, GradientSink sink);
  // `tensor`, which depends on nothing, becomes an input of the end: number `index` of those it was made for.
  void connect(const at::Tensor& tensor, size_t index) const;
  const void* identity() const { return node_.get(); }  // as reachable_nodes() has it

 private:
  NodePtr node_;
};

// All nodes of the graph behind `outputs`.
std::unordered_set<const void*> reachable_nodes(const std::vector<at::Tensor>& outputs);

// Calls `hook` when the gradient of `output` is known and its graph is about to run backward.
void before_backward_of(const at::Tensor& output, std::function<void()> hook);
// Runs `callback` when the running backward ends; it must be called inside one.
void at_end_of_backward(std::function<void()> callback);
// Whether this thread is inside a backward.
bool inside_backward();

}  // namespace tessera
