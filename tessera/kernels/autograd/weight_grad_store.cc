#include "tessera/kernels/autograd/weight_grad_store.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace tessera::kernels {
namespace {

const comm::ContextKey kWeightGradStore{"weight gradient store"};

}  // namespace

WeightGradStore::Scope::Scope(WeightGradStore* gradients)
    : gradients_(gradients), in_force_(kWeightGradStore, &gradients_) {}

WeightGradStore* WeightGradStore::current() {
  auto* const innermost = static_cast<WeightGradStore**>(comm::ContextValue::innermost(kWeightGradStore));
  return innermost == nullptr ? nullptr : *innermost;
}

WeightGradStore* WeightGradStore::current_for_weights() {
  auto* const in_force = current();
  return in_force != nullptr && in_force->stores_weight_gradients ? in_force : nullptr;
}

void WeightGradStore::add(const at::Tensor& weight, std::function<at::Tensor()> gradient) {
  auto edge = torch::autograd::impl::gradient_edge(weight);
  auto found =
      std::ranges::find_if(nodes_, [&](const auto& each) { return each.edges.front().function == edge.function; });
  if (found == nodes_.end()) found = nodes_.insert(nodes_.end(), NodeGradients{});
  found->edges.push_back(std::move(edge));
  found->gradients.push_back(std::move(gradient));
}

// Calls execute() of autograd's engine once per autograd node with all gradients of the node, so that an FSDP group
// reduces them together. Each function that computes a gradient is released as soon as it has run, so that the tensors
// that it holds are freed early.
void WeightGradStore::flush() {
  auto nodes = std::exchange(nodes_, {});
  for (auto& node : nodes) {
    torch::autograd::variable_list gradients;
    {
      const c10::NoGradGuard no_grad;
      for (auto& gradient : node.gradients) {
        gradients.push_back(gradient());
        gradient = nullptr;  // frees the tensors that the function holds
      }
    }
    torch::autograd::Engine::get_default_engine().execute(node.edges, gradients, /*keep_graph=*/false,
                                                          /*create_graph=*/false, /*accumulate_grad=*/true, {});
    node = {};
  }
}

}  // namespace tessera::kernels
