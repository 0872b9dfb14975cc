// Activations that backward recomputes instead of saving: results of RMS norm and of gated activations. Their kernels
// read and write each element once, and save their inputs for their own derivative anyway. A matrix product whose input
// is such a result saves the autograd node of the result instead of the result. This is done only on a CPU, where the
// saved memory matters more than the time of another kernel. The recomputed result has the same bits.
//
//   const auto recomputed = recomputed_activation(x, weight);       // in forward; null: save x itself
//   ...
//   recomputed->recompute()                // in the product's backward, which runs before the backward of x's kernel
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
  // The recomputed result of one autograd node. All matrix products whose input is this result share it. The first
  // recompute() computes `value`, and the last one frees it; with grad mode on, recompute() does not use `value`.
  // `users` counts the products that have not called recompute() yet.
  struct SharedResult : torch::CustomClassHolder {
    at::Tensor value;
    int users = 0;
  };
  struct RecomputeSource {
    std::function<at::Tensor()> make;  // differentiable where grad mode is on; empty: another kernel's node
    c10::intrusive_ptr<SharedResult> result;
    at::Tensor parameter = {};  // the parameter that make() reads, if any
  };
  // Returns the RecomputeSource for the autograd node with this context. `make` computes the result of the node's
  // forward again, from the tensors that the context has saved.
  static RecomputeSource source(torch::autograd::AutogradContext& context, std::function<at::Tensor()> make);

  RecomputedActivation(NodePointer node, RecomputeSource source) : node_(std::move(node)), source_(std::move(source)) {
    ++source_.result->users;
  }
  at::Tensor recompute();

 private:
  NodePointer node_;  // keeps the context alive that make() reads
  RecomputeSource source_;
};

// Returns the object that recomputes `result` in the backward of its product with `weight`. Returns null where `result`
// was not made by RMS norm or a gated activation, where `result` is not on the CPU, or where `result` depends on a
// parameter of another fully_shard group than the weight: that parameter may be freed while the product's backward
// runs.
c10::intrusive_ptr<RecomputedActivation> recomputed_activation(const at::Tensor& result, const at::Tensor& weight);

// There is one function per kernel. Each function returns the RecomputeSource of `node` if this kernel made the node,
// and an empty RecomputeSource otherwise.
RecomputedActivation::RecomputeSource recompute_source_of_gated(torch::autograd::Node* node);
RecomputedActivation::RecomputeSource recompute_source_of_rms_norm(torch::autograd::Node* node);

}  // namespace tessera::kernels
