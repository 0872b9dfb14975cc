// Gemma3, its text: sliding layers with rotary angles of their own between layers that see everything, norms around
// attention and MLP that multiply with 1 + weight, scaled embeddings, a gated gelu. Of the model with images
// (Gemma3ForConditionalGeneration) the text tower is made; the rest of its folder passes through load and save.
#pragma once

#include "tessera/models/config/family.h"
#include "tessera/models/decoder/decoder.h"

namespace tessera {

struct Gemma3DecoderLayer : DecoderLayer {
  std::shared_ptr<nn::RMSNorm> pre_feedforward_layernorm, post_feedforward_layernorm;
  Gemma3DecoderLayer(const ModelConfig& config, int64_t layer, const nn::ParameterOptions& options);
  at::Tensor forward(const at::Tensor& x, const LayerContext& context) override;
};

// Holds what is under "model" beside the vision tower, which is not made.
struct Gemma3Model : nn::Module {
  std::shared_ptr<DecoderModel> language_model;
  Gemma3Model(const ModelConfig& config, const nn::ParameterOptions& options);
};

class Gemma3ForConditionalGeneration : public CausalLM {
 public:
  std::shared_ptr<Gemma3Model> model;
  std::shared_ptr<nn::Head> lm_head;
  Gemma3ForConditionalGeneration(const ModelConfig& config, const nn::ParameterOptions& options);
  // Error kConfig for tokens that stand for an image.
  at::Tensor forward(const ModelInputs& inputs) override;
  std::vector<std::shared_ptr<nn::Module>> blocks() override;
};

const ModelFamily& gemma3_family();
const ModelFamily& gemma3_conditional_family();

}  // namespace tessera
