#include "tessera/nn/layers.h"

#include <typeinfo>

#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/kernels/linear/linear.h"
#include "tessera/kernels/logprobs/linear_logprobs.h"
#include "tessera/kernels/loss/linear_cross_entropy.h"
#include "tessera/kernels/rows/gated.h"
#include "tessera/kernels/rows/rms_norm.h"

namespace tessera::nn {

Linear::Linear(int64_t in, int64_t out, bool with_bias, const ParameterOptions& options) {
  register_parameter("weight", weight, at::empty({out, in}, options.tensor_options()));
  if (with_bias) register_parameter("bias", bias, at::empty({out}, options.tensor_options()), /*decay=*/false);
}

// Copies the parameter slots of `former` and makes the copies point to this layer's members. The tensors are shared,
// not copied, so an optimizer that holds these tensors continues to update them. The names of the parameters stay the
// same.
Linear::Linear(Linear& former, bool with_weight) {
  for (ParameterSlot slot : former.own_parameters()) {
    const bool is_weight = slot.slot == &former.weight;
    if (is_weight && !with_weight) continue;
    slot.slot = is_weight ? &weight : &bias;
    *slot.slot = slot.parameter;
    own_parameters().push_back(std::move(slot));
  }
  train(former.training());
}

at::Tensor Linear::forward(const at::Tensor& x) { return linear(x, weight, bias); }

void replace_linears(Module& root, const std::function<std::shared_ptr<Linear>(Linear& former)>& make) {
  const auto children = root.named_children();
  for (const auto& [name, child] : children) {
    auto* const linear = dynamic_cast<Linear*>(child.get());
    if (linear == nullptr) {
      replace_linears(*child, make);
      // Replace only layers whose type is exactly Linear. A derived class has its own forward, which the replacement
      // would lose.
    } else if (typeid(*linear) == typeid(Linear)) {
      root.replace_child(name, make(*linear));
    }
  }
}

Head::Head(int64_t width, int64_t classes, const ParameterOptions& options, double softcap) : softcap_(softcap) {
  register_parameter("weight", weight, at::empty({classes, width}, options.tensor_options()));
}

at::Tensor Head::forward(const at::Tensor& x) {
  const auto logits = tessera::kernels::linear(x, weight);
  return softcap_ > 0 ? logits.div(softcap_).tanh().mul(softcap_) : logits;
}

at::Tensor Head::forward(const at::Tensor& x, const at::Tensor& labels) {
  return kernels::linear_cross_entropy(x.reshape({-1, x.size(-1)}), weight, labels.reshape({-1}),
                                       {.softcap = softcap_});
}

at::Tensor Head::forward(const at::Tensor& x, const TokenTargets& targets) {
  const auto logprobs = kernels::linear_logprobs(x, weight, targets.ids, {.softcap = softcap_});
  return is_dtensor(logprobs) ? full_tensor(logprobs) : logprobs;
}

Embedding::Embedding(int64_t rows, int64_t width, const ParameterOptions& options, const EmbeddingOptions& embedding)
    : embedding_(embedding) {
  register_parameter("weight", weight, at::empty({rows, width}, options.tensor_options()));
}

at::Tensor Embedding::forward(const at::Tensor& ids) {
  const auto rows = at::embedding(weight, ids, embedding_.padding_id);
  if (embedding_.scale == 1) return rows;
  // scalar_tensor() rounds EmbeddingOptions::scale to the weight's dtype before the rows are multiplied by it.
  return rows * at::scalar_tensor(embedding_.scale, weight.scalar_type()).item();
}

RMSNorm::RMSNorm(int64_t width, const NormOptions& norm, const ParameterOptions& options) : norm_(norm) {
  register_parameter("weight", weight, at::empty({width}, options.tensor_options()), /*decay=*/false,
                     /*initial=*/norm.one_plus ? 0.0 : 1.0);
}

at::Tensor RMSNorm::forward(const at::Tensor& x) { return kernels::rms_norm(x, weight, norm_.eps, norm_.one_plus); }

MLP::MLP(int64_t width, int64_t inner, const MLPOptions& mlp, const ParameterOptions& options)
    : activation_(mlp.activation) {
  register_module("gate_proj", gate_proj, std::make_shared<Linear>(width, inner, mlp.bias, options));
  register_module("up_proj", up_proj, std::make_shared<Linear>(width, inner, mlp.bias, options));
  register_module("down_proj", down_proj, std::make_shared<Linear>(inner, width, mlp.bias, options));
}

at::Tensor MLP::forward(const at::Tensor& x) {
  const auto gate = (*gate_proj)(x), up = (*up_proj)(x);
  return (*down_proj)(activation_ == Activation::kSilu ? kernels::swiglu(gate, up) : kernels::geglu(gate, up));
}

}  // namespace tessera::nn
