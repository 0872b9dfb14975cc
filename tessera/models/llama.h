// Llama, and Mistral, which is a Llama with a sliding window. Parameters are named as in transformers' modeling_llama.
//
//   LlamaForCausalLM model(ModelConfig::from_folder(dir), {});
#pragma once

#include <memory>
#include <vector>

#include "tessera/models/causal_lm.h"
#include "tessera/models/family.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/layers.h"

namespace tessera {

struct LlamaDecoderLayer : nn::Callable<LlamaDecoderLayer> {
  std::shared_ptr<nn::Attention> self_attn;
  std::shared_ptr<nn::MLP> mlp;
  std::shared_ptr<nn::RMSNorm> input_layernorm, post_attention_layernorm;
  LlamaDecoderLayer(const ModelConfig& config, int64_t layer, const nn::ParameterOptions& options);
  virtual at::Tensor forward(const at::Tensor& x, const nn::AttentionContext& context);
};

// A list of modules named "0", "1", ...
struct LlamaLayers : nn::Module {
  std::vector<std::shared_ptr<LlamaDecoderLayer>> list;
  LlamaLayers(const ModelConfig& config, const nn::ParameterOptions& options);
};

struct LlamaModel : nn::Callable<LlamaModel> {
  std::shared_ptr<nn::Embedding> embed_tokens;
  std::shared_ptr<LlamaLayers> layers;
  std::shared_ptr<nn::RMSNorm> norm;
  LlamaModel(const ModelConfig& config, const nn::ParameterOptions& options);
  at::Tensor forward(const ModelInputs& inputs);  // [B, T, hidden]

 private:
  nn::AttentionContext attention_context(const ModelInputs& inputs, const at::TensorOptions& options) const;
  ModelConfig config_;
};

class LlamaForCausalLM : public CausalLM {
 public:
  std::shared_ptr<LlamaModel> model;
  std::shared_ptr<nn::Head> lm_head;  // tied: its weight is the embedding's
  LlamaForCausalLM(const ModelConfig& config, const nn::ParameterOptions& options);
  at::Tensor forward(const ModelInputs& inputs) override;
  std::vector<std::shared_ptr<nn::Module>> blocks() override;
};

const ModelFamily& llama_family();
const ModelFamily& mistral_family();

}  // namespace tessera
