// Autograd nodes of data parallelism: one node for each forward of a sharded group, and end nodes that replace the
// gradient accumulators of leaves.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <unordered_set>
#include <vector>

#include "tessera/parallel/data_parallel/make_node.h"

namespace tessera {

// Receives the gradients of the unsharded parameters; undefined for a parameter without a gradient.
using GradientCallback = std::function<void(std::vector<at::Tensor>&& gradients)>;

// Makes the tensors `whole` outputs of one graph node that depends on `shards`. In backward the node passes all their
// gradients to `callback` in one call and returns no gradients: the callback itself writes the gradients of the shards.
void attach_gradient_node(const std::vector<at::Tensor>& shards, const std::vector<at::Tensor>& whole,
                          GradientCallback callback);

// One end node of the graph in place of the gradient accumulators of several leaves. Forward reads tensors connected to
// this node. Each backward passes it all their gradients in one call, summed over all forwards before. The node runs as
// soon as its gradients are complete, like a leaf's accumulator, and once per inner backward of reentrant checkpoints.
class GradAccumulatorNode {
 public:
  GradAccumulatorNode(const std::vector<at::Tensor>& like, GradientCallback callback);
  // Makes `tensor`, which has no graph, input number `index` of this node: an index into `like`.
  void connect(const at::Tensor& tensor, size_t index) const;
  const void* identity() const { return node_.get(); }  // as in reachable_nodes()

 private:
  NodePtr node_;
};

// All nodes of the graph of `outputs`, by address.
std::unordered_set<const void*> reachable_nodes(const std::vector<at::Tensor>& outputs);

// Calls `hook` when the gradient of `output` is known, before backward runs through its graph.
void on_gradient_of(const at::Tensor& output, std::function<void()> hook);
// Runs `callback` at the end of the running backward. Call it inside a backward.
void at_end_of_backward(std::function<void()> callback);
// Whether this thread is inside a backward.
bool inside_backward();

}  // namespace tessera
