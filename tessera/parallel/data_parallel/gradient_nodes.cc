#include "tessera/parallel/data_parallel/gradient_nodes.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>

#include <limits>

namespace tessera {
namespace {

using torch::autograd::variable_list;

// A torch::autograd::Node, not a torch::autograd::Function: apply() of a Node owns the gradients and passes them on to
// `callback`, so `callback` can free each gradient as soon as the gradient has been packed into a buffer.
struct GatheredParameters : torch::autograd::Node {
  using Node::Node;
  GradientCallback callback;

  variable_list apply(variable_list&& gradients) override {
    callback(std::move(gradients));
    return variable_list(num_outputs());
  }
  std::string name() const override { return "GatheredParameters"; }
};

// The autograd node that a GradAccumulatorNode owns. This node has no next edges, so backward ends in it.
struct ReplicatedParameters : GatheredParameters {
  // UINT64_MAX is the sequence number of autograd's AccumulateGrad nodes: the engine runs ready nodes with this number
  // first.
  ReplicatedParameters() : GatheredParameters(std::numeric_limits<uint64_t>::max()) {}
  std::string name() const override { return "ReplicatedParameters"; }
};

}  // namespace

void attach_gradient_node(const std::vector<at::Tensor>& shards, const std::vector<at::Tensor>& whole,
                          GradientCallback callback) {
  auto [pointer, node] = make_node<GatheredParameters>();
  node->callback = std::move(callback);
  node->set_next_edges(torch::autograd::collect_next_edges(shards));
  torch::autograd::set_history(whole, pointer);
}

GradAccumulatorNode::GradAccumulatorNode(const std::vector<at::Tensor>& like, GradientCallback callback) {
  auto [pointer, node] = make_node<ReplicatedParameters>();
  node->callback = std::move(callback);
  for (const auto& tensor : like) node->add_input_metadata(tensor);
  node_ = std::move(pointer);
}

void GradAccumulatorNode::connect(const at::Tensor& tensor, size_t index) const {
  torch::autograd::impl::set_gradient_edge(tensor, {node_, static_cast<uint32_t>(index)});
}

// A depth-first search with an explicit stack, because recursion over a deep graph could overflow the call stack.
std::unordered_set<const void*> reachable_nodes(const std::vector<at::Tensor>& outputs) {
  std::unordered_set<const void*> seen;
  std::vector<torch::autograd::Node*> open;
  const auto visit = [&](torch::autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) open.push_back(node);
  };
  for (const auto& output : outputs) visit(torch::autograd::impl::gradient_edge(output).function.get());
  while (!open.empty()) {
    auto* node = open.back();
    open.pop_back();
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  return seen;
}

void on_gradient_of(const at::Tensor& output, std::function<void()> hook) {
  output.register_hook([hook = std::move(hook)](const at::Tensor&) { hook(); });
}

void at_end_of_backward(std::function<void()> callback) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
}

bool inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

}  // namespace tessera
