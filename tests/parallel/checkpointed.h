// Test layers that recompute their activations in backward, as reentrant checkpoints do: forward runs without a graph;
// backward runs forward again and then a nested backward through the new graph.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include "tests/parallel/small_model.h"

namespace tessera::testing {

struct Recompute : torch::autograd::Function<Recompute> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, Layer* layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = reinterpret_cast<int64_t>(layer);
    return (*layer)(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    at::AutoGradMode on(true);
    const auto input = context->get_saved_variables()[0].detach().set_requires_grad(true);
    auto output = (*reinterpret_cast<Layer*>(context->saved_data["layer"].toInt()))(input);
    output.backward(gradients[0]);
    return {input.grad(), {}};
  }
};

struct Checkpointed : nn::Callable<Checkpointed> {
  std::vector<std::shared_ptr<Layer>> layers;
  std::vector<bool> recompute;  // one value for each layer
  explicit Checkpointed(std::vector<bool> recompute) : recompute(std::move(recompute)) {
    Values values(3);
    for (size_t i = 0; i < this->recompute.size(); ++i) {
      layers.push_back(register_module(std::to_string(i), std::make_shared<Layer>(values, 6, 10)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (size_t i = 0; i < layers.size(); ++i) {
      x = recompute[i] ? Recompute::apply(x, layers[i].get()) : (*layers[i])(x);
    }
    return x;
  }
};

}  // namespace tessera::testing
