// Gemma3, text only. Sliding-window layers alternate with full-attention layers and have their own rotary angles.
// Attention and MLP each have a norm before and a norm after them; norms multiply by 1 + weight. Embeddings are scaled,
// and the MLP uses a gated gelu. Of the model with images (Gemma3ForConditionalGeneration) only the text tower is made.
// save_pretrained copies the tensors that are not made (vision tower, projector) from the source folder unchanged.
#pragma once

#include "tessera/models/config/family.h"
#include "tessera/models/decoder/decoder.h"

namespace tessera {

struct Gemma3DecoderLayer : DecoderLayer {
  std::shared_ptr<nn::RMSNorm> pre_feedforward_layernorm, post_feedforward_layernorm;
  Gemma3DecoderLayer(const ModelConfig& config, int64_t layer, const nn::ParameterOptions& options);
  at::Tensor forward(const at::Tensor& x, const LayerContext& context) override;
};

// The module "model" of Gemma3ForConditionalGeneration. It has language_model only; the vision tower is not made.
struct Gemma3Model : nn::Module {
  std::shared_ptr<DecoderModel> language_model;
  Gemma3Model(const ModelConfig& config, const nn::ParameterOptions& options);
};

class Gemma3ForConditionalGeneration : public CausalLM {
 public:
  std::shared_ptr<Gemma3Model> model;
  std::shared_ptr<nn::Head> lm_head;
  Gemma3ForConditionalGeneration(const ModelConfig& config, const nn::ParameterOptions& options);
  // Computes the result of CausalLM::forward() with the language model. Error kConfig when inputs.tokens has image
  // placeholder tokens.
  at::Tensor forward(const ModelInputs& inputs) override;
  std::vector<std::shared_ptr<nn::Module>> blocks() override;
};

const ModelFamily& gemma3_family();
const ModelFamily& gemma3_conditional_family();

}  // namespace tessera
