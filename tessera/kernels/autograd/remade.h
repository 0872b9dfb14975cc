// Results that backward makes again instead of keeping: of kernels that read and write each element once, and keep
// what they are made of for their own derivative anyway. A product whose factor is such a result keeps where it came
// from. On a CPU, where memory counts more than a launch; what is made again has the same bits.
//
//   const auto again = remade(x, weight);             // in forward; null: keep x itself
//   ...
//   again->get()                                              // in backward, which is before that of x's own kernel
//
// Belongs to one graph, and to the thread that runs it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <functional>
#include <type_traits>
#include <utility>

namespace tessera::kernels {

class Remade : public torch::CustomClassHolder {
 public:
  using NodePointer = std::decay_t<decltype(std::declval<at::Tensor>().grad_fn())>;
  // What the products of one result share: the first one makes it, the last one frees it.
  struct Result : torch::CustomClassHolder {
    at::Tensor value;
    int users = 0;
  };
  struct Source {
    std::function<at::Tensor()> make;  // differentiable where gradients are enabled; empty: a node of another kernel
    c10::intrusive_ptr<Result> result;
    at::Tensor parameter = {};  // that it reads, if any
  };
  // With `make`, which reads the context of a kernel's node.
  static Source source(torch::autograd::AutogradContext& context, std::function<at::Tensor()> make);

  Remade(NodePointer node, Source source) : node_(std::move(node)), source_(std::move(source)) {
    ++source_.result->users;
  }
  at::Tensor get();

 private:
  NodePointer node_;  // whose context is read
  Source source_;
};

// For a product of `result` with `weight`. Null where it is that of another kernel, lies elsewhere, or is made with a
// parameter of another group of fully_shard than the weight's: that may be freed while the product's backward runs.
c10::intrusive_ptr<Remade> remade(const at::Tensor& result, const at::Tensor& weight);

// One a kernel: of its nodes.
Remade::Source source_of_gated(torch::autograd::Node* node);
Remade::Source source_of_rms_norm(torch::autograd::Node* node);

}  // namespace tessera::kernels
