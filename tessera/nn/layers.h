// The layers of transformer models, with the parameter names of Hugging Face.
//
//   auto mlp = std::make_shared<nn::MLP>(576, 1536, nn::MLPOptions{}, nn::ParameterOptions{});
//   at::Tensor y = (*mlp)(x);                     // x [..., 576]
//
// A layer of a derived class may replace a layer of its base class (Module::replace_child), because forward is virtual.
// Parameters are uninitialised (options.h). Ownership and thread rules are those of nn::Module.
#pragma once

#include <functional>
#include <memory>

#include "tessera/nn/activation.h"
#include "tessera/nn/module.h"
#include "tessera/nn/options.h"

namespace tessera::nn {

// weight [out, in]; bias [out] where with_bias is true.
struct Linear : Callable<Linear> {
  at::Tensor weight, bias;
  Linear(int64_t in, int64_t out, bool with_bias, const ParameterOptions& options);
  virtual at::Tensor forward(const at::Tensor& x);

 protected:
  // For layers that replace `former` in its parent: takes over the parameters of `former`, without the weight if
  // with_weight is false.
  Linear(Linear& former, bool with_weight);
};

// Replaces each Linear below `root` by the layer that make(former) returns. Layers of classes derived from Linear are
// kept.
void replace_linears(Module& root, const std::function<std::shared_ptr<Linear>(Linear& former)>& make);

// The tokens whose log-probs are requested: int64, for each position a token id or kIgnoredLabel.
struct TokenTargets {
  at::Tensor ids;
  template <class F>
  void visit_tensors(F&& visit) {
    visit(ids);
  }
};

// The last layer of a language model: weight [classes, width].
struct Head : Callable<Head> {
  at::Tensor weight;
  // With softcap > 0 the logits are softcap * tanh(logits / softcap).
  Head(int64_t width, int64_t classes, const ParameterOptions& options, double softcap = 0);
  virtual at::Tensor forward(const at::Tensor& x);  // logits
  // Returns the cross entropy of the logits, summed over all labels that are not kIgnoredLabel. The logits are computed
  // in chunks and are never all in memory.
  virtual at::Tensor forward(const at::Tensor& x, const at::Tensor& labels);
  // Returns log p(target) of each position, a plain tensor in float32 or wider; 0 for kIgnoredLabel. If x and weight
  // are DTensors, the result is all-gathered. The logits are computed in chunks (kernels/logprobs/linear_logprobs.h).
  virtual at::Tensor forward(const at::Tensor& x, const TokenTargets& targets);

 private:
  double softcap_;
};

struct EmbeddingOptions {
  // The row padding_id of the weight gets no gradient, as with padding_idx of torch.nn.Embedding. -1: all rows get
  // gradients.
  int64_t padding_id = -1;
  double scale = 1;  // factor of the embeddings, rounded to the weight's dtype first
};

// weight [rows, width]; ids int64 of any shape, each below rows (not checked).
struct Embedding : Callable<Embedding> {
  at::Tensor weight;
  Embedding(int64_t rows, int64_t width, const ParameterOptions& options, const EmbeddingOptions& embedding = {});
  virtual at::Tensor forward(const at::Tensor& ids);

 private:
  EmbeddingOptions embedding_;
};

struct NormOptions {
  double eps = 1e-6;
  bool one_plus = false;  // the factor is 1 + weight, and the weight starts at zero
};

// weight [width], without weight decay. See kernels/rows/rms_norm.h.
struct RMSNorm : Callable<RMSNorm> {
  at::Tensor weight;
  RMSNorm(int64_t width, const NormOptions& norm, const ParameterOptions& options);
  virtual at::Tensor forward(const at::Tensor& x);

 private:
  NormOptions norm_;
};

struct MLPOptions {
  Activation activation = Activation::kSilu;
  bool bias = false;
};

// down_proj(activation(gate_proj(x)) * up_proj(x)).
struct MLP : Callable<MLP> {
  std::shared_ptr<Linear> gate_proj, up_proj, down_proj;
  MLP(int64_t width, int64_t inner, const MLPOptions& mlp, const ParameterOptions& options);
  virtual at::Tensor forward(const at::Tensor& x);

 private:
  Activation activation_;
};

}  // namespace tessera::nn
