// The layers that transformers are made of, with the parameter names of Hugging Face.
//
//   auto mlp = std::make_shared<nn::MLP>(576, 1536, /*bias=*/false, nn::ParameterOptions{});
//   at::Tensor y = (*mlp)(x);                     // x [..., 576]
//
// A layer may be derived from and put in another's place (Module::replace_child): forward is virtual. Parameters are
// uninitialised (see options.h). Layers have the ownership and thread rules of nn::Module.
#pragma once

#include "tessera/nn/module.h"
#include "tessera/nn/options.h"

namespace tessera::nn {

// weight [out, in], bias [out] where asked for.
struct Linear : Callable<Linear> {
  at::Tensor weight, bias;
  Linear(int64_t in, int64_t out, bool with_bias, const ParameterOptions& options);
  virtual at::Tensor forward(const at::Tensor& x);
};

// The last layer of a language model: weight [classes, width].
struct Head : Callable<Head> {
  at::Tensor weight;
  Head(int64_t width, int64_t classes, const ParameterOptions& options);
  virtual at::Tensor forward(const at::Tensor& x);  // logits
  // The cross entropy of the logits, summed over the labels that are not kIgnoredLabel; never holds all logits.
  virtual at::Tensor forward(const at::Tensor& x, const at::Tensor& labels);
};

// weight [rows, width]; ids int64 of any shape, each below rows (not checked here).
struct Embedding : Callable<Embedding> {
  at::Tensor weight;
  // The row of padding_id learns nothing from being looked up, as in torch.nn.Embedding(padding_idx); -1: all rows
  // learn.
  Embedding(int64_t rows, int64_t width, const ParameterOptions& options, int64_t padding_id = -1);
  virtual at::Tensor forward(const at::Tensor& ids);

 private:
  int64_t padding_id_;
};

// weight [width], without weight decay.
struct RMSNorm : Callable<RMSNorm> {
  at::Tensor weight;
  RMSNorm(int64_t width, double eps, const ParameterOptions& options);
  virtual at::Tensor forward(const at::Tensor& x);

 private:
  double eps_;
};

// down_proj(silu(gate_proj(x)) * up_proj(x)).
struct MLP : Callable<MLP> {
  std::shared_ptr<Linear> gate_proj, up_proj, down_proj;
  MLP(int64_t width, int64_t inner, bool bias, const ParameterOptions& options);
  virtual at::Tensor forward(const at::Tensor& x);
};

}  // namespace tessera::nn
