// The layers that transformers are made of, with the parameter names of Hugging Face.
//
//   auto mlp = std::make_shared<nn::MLP>(576, 1536, nn::MLPOptions{}, nn::ParameterOptions{});
//   at::Tensor y = (*mlp)(x);                     // x [..., 576]
//
// A layer may be derived from and put in another's place (Module::replace_child): forward is virtual. Parameters are
// uninitialised (see options.h). Layers have the ownership and thread rules of nn::Module.
#pragma once

#include <functional>
#include <memory>

#include "tessera/nn/activation.h"
#include "tessera/nn/module.h"
#include "tessera/nn/options.h"

namespace tessera::nn {

// weight [out, in], bias [out] where asked for.
struct Linear : Callable<Linear> {
  at::Tensor weight, bias;
  Linear(int64_t in, int64_t out, bool with_bias, const ParameterOptions& options);
  virtual at::Tensor forward(const at::Tensor& x);

 protected:
  // In the place of `former`, whose parameters it shows; without its weight where that is kept in another form.
  Linear(Linear& former, bool with_weight);
};

// Puts what `make` gives in the place of each Linear below `root` that is one exactly; derived ones are left alone.
void replace_linears(Module& root, const std::function<std::shared_ptr<Linear>(Linear& former)>& make);

// The tokens whose log-probs are asked for: int64, one each of the positions, or kIgnoredLabel.
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
  // softcap > 0: logits are softcap * tanh(logits / softcap).
  Head(int64_t width, int64_t classes, const ParameterOptions& options, double softcap = 0);
  virtual at::Tensor forward(const at::Tensor& x);  // logits
  // The cross entropy of the logits, summed over the labels that are not kIgnoredLabel; never holds all logits.
  virtual at::Tensor forward(const at::Tensor& x, const at::Tensor& labels);
  // log p(target) of each position, float32 at least and plain; 0 for kIgnoredLabel. Of x and weight that are DTensors
  // it is of all positions. Never holds all logits: see kernels/logprobs/linear_logprobs.h.
  virtual at::Tensor forward(const at::Tensor& x, const TokenTargets& targets);

 private:
  double softcap_;
};

struct EmbeddingOptions {
  // The row of padding_id learns nothing from being looked up, as in torch.nn.Embedding(padding_idx); -1: all rows
  // learn.
  int64_t padding_id = -1;
  double scale = 1;  // of what is looked up, rounded to the weight's dtype first
};

// weight [rows, width]; ids int64 of any shape, each below rows (not checked here).
struct Embedding : Callable<Embedding> {
  at::Tensor weight;
  Embedding(int64_t rows, int64_t width, const ParameterOptions& options, const EmbeddingOptions& embedding = {});
  virtual at::Tensor forward(const at::Tensor& ids);

 private:
  EmbeddingOptions embedding_;
};

struct NormOptions {
  double eps = 1e-6;
  bool one_plus = false;  // rows are multiplied with 1 + weight, whose values begin at zero
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
