// The layers of transformer models, with the parameter names of Hugging Face.
//
//   auto mlp = std::make_shared<nn::MLP>(576, 1536, nn::MLPOptions{}, nn::ParameterOptions{});
//   at::Tensor y = (*mlp)(x);                     // x [..., 576]
//
// A derived layer may replace its base (Module::replace_child), because forward is virtual. Parameters are
// uninitialised (options.h). Ownership and thread rules are those of nn::Module.
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
  // Takes over the parameters of `former` (without the weight where with_weight is false), to replace it in its parent.
  Linear(Linear& former, bool with_weight);
};

// Replaces each Linear below `root` by make(linear). Layers of classes derived from Linear stay unchanged.
void replace_linears(Module& root, const std::function<std::shared_ptr<Linear>(Linear& former)>& make);

// The tokens whose log-probs are requested: int64, one per position, or kIgnoredLabel.
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
  // softcap > 0: logits become softcap * tanh(logits / softcap).
  Head(int64_t width, int64_t classes, const ParameterOptions& options, double softcap = 0);
  virtual at::Tensor forward(const at::Tensor& x);  // logits
  // The cross entropy of the logits, summed over all labels that are not kIgnoredLabel. The full logits never exist.
  virtual at::Tensor forward(const at::Tensor& x, const at::Tensor& labels);
  // log p(target) of each position, a plain tensor in float32 or wider; 0 for kIgnoredLabel. With DTensors x and weight
  // it covers all positions. The full logits never exist (kernels/logprobs/linear_logprobs.h).
  virtual at::Tensor forward(const at::Tensor& x, const TokenTargets& targets);

 private:
  double softcap_;
};

struct EmbeddingOptions {
  // Lookups of padding_id give its row no gradient, as in torch.nn.Embedding(padding_idx). -1: no such row.
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
