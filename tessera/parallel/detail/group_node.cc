#include "tessera/parallel/detail/group_node.h"

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>

#include <type_traits>

namespace tessera::parallel {
namespace {

using torch::autograd::variable_list;
// shared_ptr or intrusive_ptr, by the version of libtorch.
using NodePtr = std::remove_cvref_t<decltype(std::declval<torch::autograd::Edge>().function)>;

// A node rather than a torch::autograd::Function: it owns the gradients that it is called with, so the sink can free each
// as soon as it has been packed.
struct GatheredParameters : torch::autograd::Node {
  GradientSink sink;

  variable_list apply(variable_list&& gradients) override {
    sink(std::move(gradients));
    return variable_list(num_outputs());
  }
  std::string name() const override { return "GatheredParameters"; }
};

template <class Pointer>
std::pair<Pointer, GatheredParameters*> make_node() {
  auto node = [] {
    if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
      return std::make_shared<GatheredParameters>();
    } else {
      return c10::make_intrusive<GatheredParameters>();
    }
  }();
  auto* plain = node.get();
  return {Pointer(std::move(node)), plain};
}

}  // namespace

void connect_gradients(const std::vector<at::Tensor>& shards, const std::vector<at::Tensor>& whole, GradientSink sink) {
  auto [pointer, node] = make_node<NodePtr>();
  node->sink = std::move(sink);
  node->set_next_edges(torch::autograd::collect_next_edges(shards));
  torch::autograd::set_history(whole, pointer);
}

void before_backward_of(const at::Tensor& output, std::function<void()> hook) {
  output.register_hook([hook = std::move(hook)](const at::Tensor&) { hook(); });
}

void at_end_of_backward(std::function<void()> callback) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
}

bool inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

}  // namespace tessera::parallel
