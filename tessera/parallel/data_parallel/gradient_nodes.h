// Autograd nodes of data parallelism: one node for each forward of a sharded group, and nodes in which backward ends
// and which replace the AccumulateGrad nodes of leaves.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <unordered_set>
#include <vector>

#include "tessera/parallel/data_parallel/make_node.h"

namespace tessera {

// Receives the gradients of the unsharded parameters. The tensor of a parameter without a gradient is undefined.
using GradientCallback = std::function<void(std::vector<at::Tensor>&& gradients)>;

// Makes the tensors `whole` outputs of one graph node that depends on `shards`. In backward the node passes all their
// gradients to `callback` in one call and returns no gradients: the callback itself writes the gradients of the shards.
void attach_gradient_node(const std::vector<at::Tensor>& shards, const std::vector<at::Tensor>& whole,
                          GradientCallback callback);

// One autograd node that replaces the AccumulateGrad nodes of several leaf tensors. Forward reads tensors that
// connect() has attached to this node. Each backward calls the node once with the gradients of all these tensors, each
// summed over all forwards that the backward covers. The node runs as soon as its gradients are complete, like
// AccumulateGrad. With reentrant checkpoints each inner backward calls the node once.
class GradAccumulatorNode {
 public:
  GradAccumulatorNode(const std::vector<at::Tensor>& like, GradientCallback callback);
  // Sends the gradient of `tensor`, which has no autograd graph, to input `index` of this node. The input has the shape
  // and dtype of like[index] of the constructor.
  void connect(const at::Tensor& tensor, size_t index) const;
  const void* identity() const { return node_.get(); }  // the node's address, as in reachable_nodes()

 private:
  NodePtr node_;
};

// The addresses of all nodes of the autograd graph of `outputs`.
std::unordered_set<const void*> reachable_nodes(const std::vector<at::Tensor>& outputs);

// Calls `hook` when backward has computed the gradient of `output`, before backward runs the nodes that made `output`.
void on_gradient_of(const at::Tensor& output, std::function<void()> hook);
// Runs `callback` at the end of the running backward. Call it inside a backward.
void at_end_of_backward(std::function<void()> callback);
// Whether this thread is inside a backward.
bool inside_backward();

}  // namespace tessera
