// Results that backward recomputes instead of saving. The kernels concerned read and write each element once, and save
// their inputs for their own derivative anyway. A product whose input is such a result saves the input's graph node
// instead. Only on a CPU, where memory matters more than a launch. The recomputed result has the same bits.
//
//   const auto recomputed = recomputed_activation(x, weight);       // in forward; null: save x itself
//   ...
//   recomputed->recompute()                                  // in backward, which runs before that of x's own kernel
//
// An object belongs to one graph and to the thread that runs its backward.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <functional>
#include <type_traits>
#include <utility>

namespace tessera::kernels {

class RecomputedActivation : public torch::CustomClassHolder {
 public:
  using NodePointer = std::decay_t<decltype(std::declval<at::Tensor>().grad_fn())>;
  // Shared by all products of one result: the first recompute() computes the value, the last one frees it.
  struct SharedResult : torch::CustomClassHolder {
    at::Tensor value;
    int users = 0;
  };
  struct RecomputeSource {
    std::function<at::Tensor()> make;  // differentiable where grad mode is on; empty: another kernel's node
    c10::intrusive_ptr<SharedResult> result;
    at::Tensor parameter = {};  // the parameter that make() reads, if any
  };
  // Makes the source of a node. `make` reads the saved tensors of the node's context.
  static RecomputeSource source(torch::autograd::AutogradContext& context, std::function<at::Tensor()> make);

  RecomputedActivation(NodePointer node, RecomputeSource source) : node_(std::move(node)), source_(std::move(source)) {
    ++source_.result->users;
  }
  at::Tensor recompute();

 private:
  NodePointer node_;  // keeps the context alive that make() reads
  RecomputeSource source_;
};

// The source of `result` for a product of `result` with `weight`. Null where another kernel made the result, where the
// result is not on the CPU, or where it depends on a parameter of another fully_shard group than the weight: that
// parameter may be freed while the product's backward runs.
c10::intrusive_ptr<RecomputedActivation> recomputed_activation(const at::Tensor& result, const at::Tensor& weight);

// One function per kernel: the source of that kernel's nodes, or an empty source for other nodes.
RecomputedActivation::RecomputeSource recompute_source_of_gated(torch::autograd::Node* node);
RecomputedActivation::RecomputeSource recompute_source_of_rms_norm(torch::autograd::Node* node);

}  // namespace tessera::kernels
