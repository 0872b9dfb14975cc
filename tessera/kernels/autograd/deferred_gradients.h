// Gradients of weights that are computed at another time than backward would: later, when a pipeline has nothing better
// to do, or sooner, so that a loss need not keep that of its head.
//
//   DeferredGradients later;
//   {
//     const DeferredGradients::Scope scope(&later);
//     y = model(x);
//     y.backward(g);          // gradients of inputs, norms, biases
//   }
//   later.flush();            // of the weights of linear() and grouped_linear()
//
// Values are those of a whole backward, and go the same way: through the graph behind each weight, so that sharded and
// replicated parameters get them as ever. Other products, and modules that are recomputed in backward, defer nothing.
// Belongs to one rank. A flush is COLLECTIVE as the backward would be.
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

  // In force until its end, in backwards that run meanwhile too. Null: none, whatever is in force around it.
  class Scope {
   public:
    explicit Scope(DeferredGradients* gradients);
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    DeferredGradients* gradients_;  // what is in force is behind a pointer: a null value would mean the scope around
    comm::Propagated in_force_;
  };
  static DeferredGradients* current();  // null: none is in force

  // What a loss will be multiplied with before its backward: losses in its scope then leave the gradient of their head
  // here in forward, times this. None (default): backward has it.
  std::optional<double> loss_factor{};
  // Whether backwards of products in its scope leave gradients of weights here.
  bool takes_weights = true;
  // What is in force, if it takes them.
  static DeferredGradients* taking_weights();

  // `weight` as forward read it, with its graph; `gradient` is called once, at the flush.
  void add(const at::Tensor& weight, std::function<at::Tensor()> gradient);
  bool empty() const { return nodes_.empty(); }
  // Computes all gradients, one node of the graph at a time, and hands them on; then there are none.
  void flush();

 private:
  // Those whose graph goes on in one node: what is sharded together gets its gradients together.
  struct OfNode {
    torch::autograd::edge_list edges;
    std::vector<std::function<at::Tensor()>> gradients;
  };
  std::vector<OfNode> nodes_;
};

}  // namespace tessera::kernels
