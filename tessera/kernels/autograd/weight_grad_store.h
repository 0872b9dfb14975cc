// Weight gradients that are computed at another time than in backward: later, in the idle time of a pipeline (the W
// step of zero-bubble schedules), or earlier, so that a loss does not keep the gradient of its head.
//
//   DeferredGradients later;
//   {
//     const DeferredGradients::Scope scope(&later);
//     y = model(x);
//     y.backward(g);          // gradients of inputs, norms, biases
//   }
//   later.flush();            // of the weights of linear() and grouped_linear()
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

#include "tessera/comm/group/propagated.h"

namespace tessera::kernels {

class DeferredGradients {
 public:
  DeferredGradients() = default;
  DeferredGradients(const DeferredGradients&) = delete;
  DeferredGradients& operator=(const DeferredGradients&) = delete;

  // In force until its end, also in backwards that run during it. Null switches an outer scope off.
  class Scope {
   public:
    explicit Scope(DeferredGradients* gradients);
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    DeferredGradients* gradients_;  // behind a pointer, because a null value would mean the outer scope
    comm::Propagated in_force_;
  };
  static DeferredGradients* current();  // null: no scope is in force

  // The factor that the loss will be multiplied by before its backward. If set, a loss in the scope computes the
  // gradient of its head in forward, multiplies it by this factor and adds it here. Nullopt: backward computes it.
  std::optional<double> loss_factor{};
  // Whether the backward of a product in the scope adds the weight's gradient here.
  bool takes_weights = true;
  // current(), if its takes_weights is true; else null.
  static DeferredGradients* taking_weights();

  // weight: the tensor that forward read, with its graph. gradient: called once, at the flush.
  void add(const at::Tensor& weight, std::function<at::Tensor()> gradient);
  bool empty() const { return nodes_.empty(); }
  // Computes all gradients, one graph node at a time, and passes them to the graph. The object is empty afterwards.
  void flush();

 private:
  // Gradients whose weights come from the same graph node. A node gets all its gradients in one call, because weights
  // that are sharded together (a parameter group) need their gradients together.
  struct OfNode {
    torch::autograd::edge_list edges;
    std::vector<std::function<at::Tensor()>> gradients;
  };
  std::vector<OfNode> nodes_;
};

}  // namespace tessera::kernels
