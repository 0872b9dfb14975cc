// Weight gradients that are computed at another time than in backward: later, in the idle time of a pipeline (the W
// step of zero-bubble schedules), or earlier, so that a loss does not keep the gradient of its head.
//
//   WeightGradStore store;
//   {
//     const WeightGradStore::Scope scope(&store);
//     y = model(x);
//     y.backward(g);          // gradients of inputs, norms, biases
//   }
//   store.flush();            // of the weights of linear() and grouped_linear()
//
// The gradients have the values of an ordinary backward and go through the graph behind each weight, so that sharded
// and replicated parameters get them as usual. Other products, and modules that are recomputed in backward, defer
// nothing. An object belongs to one rank. A flush is COLLECTIVE in the same way as the backward would be.
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

  // While a Scope exists, its store receives the weight gradients of forwards on this thread and of every backward that
  // runs in that time. Scope(nullptr) disables an outer Scope.
  class Scope {
   public:
    explicit Scope(WeightGradStore* gradients);
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    WeightGradStore* gradients_;  // behind a pointer, because a null value would mean the outer scope
    comm::ContextValue in_force_;
  };
  static WeightGradStore* current();  // null: no scope is in force

  // The factor that the loss will be multiplied by before its backward. If set, a loss in the scope computes the
  // gradient of its head in forward, multiplies it by this factor and adds it here. Nullopt: backward computes it.
  std::optional<double> loss_factor{};
  // Whether the backward of a product in the scope adds the weight's gradient here.
  bool stores_weight_gradients = true;
  // current(), if its stores_weight_gradients is true; else null.
  static WeightGradStore* current_for_weights();

  // weight: the tensor that forward read, with its graph. gradient: called once, at the flush.
  void add(const at::Tensor& weight, std::function<at::Tensor()> gradient);
  bool empty() const { return nodes_.empty(); }
  // Computes all gradients, one graph node at a time, and passes them to the graph. The object is empty afterwards.
  void flush();

 private:
  // Gradients whose weights come from the same graph node. A node gets all its gradients in one call, because weights
  // that are sharded together (a parameter group) need their gradients together.
  struct NodeGradients {
    torch::autograd::edge_list edges;
    std::vector<std::function<at::Tensor()>> gradients;
  };
  std::vector<NodeGradients> nodes_;
};

}  // namespace tessera::kernels
