// Stores gradients of weights that are computed at another time than in backward:
// - later, in the idle time of a pipeline (the W step of zero-bubble schedules);
// - or earlier, in the forward of a loss. The loss puts the gradient of its head's weight into the store, so it
//   need not keep this gradient until backward.
//
//   WeightGradStore store;
//   {
//     const WeightGradStore::Scope scope(&store);
//     y = model(x);
//     y.backward(g);          // gradients of inputs, norms, biases
//   }
//   store.flush();            // gradients of the weights of linear() and grouped_linear()
//
// The gradients have the values of an ordinary backward and go through the graph behind each weight, so that
// sharded and replicated parameters get them as usual. Gradients of other products, and of modules that are
// recomputed in backward, are computed in backward as usual. An object belongs to one rank. flush() is COLLECTIVE
// in the same way as an ordinary backward would be.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <functional>
#include <optional>
#include <vector>

#include "tessera/comm/group/context_value.h"

namespace tessera::kernels {

class WeightGradStore {
 public:
  WeightGradStore() = default;
  WeightGradStore(const WeightGradStore&) = delete;
  WeightGradStore& operator=(const WeightGradStore&) = delete;

  // While a Scope exists, its store receives the weight gradients of losses whose forward runs on this thread, and of
  // every backward that this thread starts. Scope(nullptr) disables an outer Scope.
  class Scope {
   public:
    explicit Scope(WeightGradStore* gradients);
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    WeightGradStore* gradients_;  // in_force_ holds its address, because a null value would mean the outer scope
    comm::ContextValue in_force_;
  };
  static WeightGradStore* current();  // null: no scope is in force

  // The factor by which the caller will multiply the loss before backward. If it is set, a fused loss
  // (linear_cross_entropy) whose forward runs in the scope computes the gradient of the head's weight in forward,
  // multiplies it by this factor and adds it to this store. Nullopt: backward computes that gradient.
  std::optional<double> loss_factor{};
  // Whether the backward of linear() and grouped_linear() in the scope adds the weight's gradient to this store.
  bool stores_weight_gradients = true;
  // current(), if its stores_weight_gradients is true; else null.
  static WeightGradStore* current_for_weights();

  // Adds a gradient. weight: the tensor that forward read, with its autograd graph. flush() calls gradient() once to
  // compute the gradient.
  void add(const at::Tensor& weight, std::function<at::Tensor()> gradient);
  bool empty() const { return nodes_.empty(); }
  // Computes the gradients in this store, one autograd node at a time, and runs backward with them through the autograd
  // graphs that the weights come from. The store is empty afterwards.
  void flush();

 private:
  // Gradients whose weights come from the same autograd node. A node gets all its gradients in one call, because
  // weights that are sharded together (a parameter group) need their gradients together.
  struct NodeGradients {
    torch::autograd::edge_list edges;
    std::vector<std::function<at::Tensor()>> gradients;
  };
  std::vector<NodeGradients> nodes_;
};

}  // namespace tessera::kernels
