#include "tessera/kernels/autograd/deferred_gradients.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <vector>

#include "tessera/comm/group/propagated.h"

namespace tessera::kernels {
namespace {

const comm::PropagatedKind kDeferredGradients{"deferred gradients"};

}  // namespace

// Those whose graph goes on in one node: what is sharded together gets its gradients together.
struct DeferredGradients::Waiting {
  struct OfNode {
    torch::autograd::edge_list edges;
    std::vector<std::function<at::Tensor()>> gradients;
  };
  std::vector<OfNode> nodes;
};

struct DeferredGradients::Scope::State {
  // What is in force is behind a pointer: a null value would mean the scope around.
  explicit State(DeferredGradients* gradients)
      : gradients(gradients), propagated(kDeferredGradients, &this->gradients) {}
  DeferredGradients* gradients;
  comm::Propagated propagated;
};

DeferredGradients::DeferredGradients() : waiting_(std::make_unique<Waiting>()) {}
DeferredGradients::~DeferredGradients() = default;

DeferredGradients::Scope::Scope(DeferredGradients* gradients) : state_(std::make_unique<State>(gradients)) {}
DeferredGradients::Scope::~Scope() = default;

DeferredGradients* DeferredGradients::current() {
  auto* const innermost = static_cast<DeferredGradients**>(comm::Propagated::innermost(kDeferredGradients));
  return innermost == nullptr ? nullptr : *innermost;
}

DeferredGradients* DeferredGradients::taking_weights() {
  auto* const in_force = current();
  return in_force != nullptr && in_force->takes_weights ? in_force : nullptr;
}

void DeferredGradients::add(const at::Tensor& weight, std::function<at::Tensor()> gradient) {
  auto edge = torch::autograd::impl::gradient_edge(weight);
  auto& nodes = waiting_->nodes;
  auto found =
      std::ranges::find_if(nodes, [&](const auto& each) { return each.edges.front().function == edge.function; });
  if (found == nodes.end()) found = nodes.insert(nodes.end(), Waiting::OfNode{});
  found->edges.push_back(std::move(edge));
  found->gradients.push_back(std::move(gradient));
}

bool DeferredGradients::empty() const { return waiting_->nodes.empty(); }

void DeferredGradients::flush() {
  auto nodes = std::exchange(waiting_->nodes, {});
  for (auto& node : nodes) {
    torch::autograd::variable_list gradients;
    {
      const c10::NoGradGuard no_grad;
      for (auto& gradient : node.gradients) {
        gradients.push_back(gradient());
        gradient = nullptr;  // and what it holds
      }
    }
    torch::autograd::Engine::get_default_engine().execute(node.edges, gradients, /*keep_graph=*/false,
                                                          /*create_graph=*/false, /*accumulate_grad=*/true, {});
    node = {};
  }
}

}  // namespace tessera::kernels
