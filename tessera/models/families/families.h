// The rows of the families whose models are made of the decoder's own layers, and what several of them share. Gemma3
// has layers and a header of its own.
#pragma once

#include "tessera/models/config/family.h"

namespace tessera {

const ModelFamily& llama_family();
const ModelFamily& mistral_family();
const ModelFamily& qwen2_family();
const ModelFamily& qwen3_family();
const ModelFamily& qwen3_moe_family();

// Rows of DecoderLayers whose attention is as the config says.
std::shared_ptr<CausalLM> make_llama(const ModelConfig& config, const nn::ParameterOptions& options);
// base_model_tp_plan of LlamaConfig and others.
std::vector<PlanKeys::Style> llama_layer_styles();
// The same, and what transformers says of q_norm and k_norm.
std::vector<PlanKeys::Style> normed_layer_styles();
// WindowKeys::slides of the Qwen families: the layers from max_window_layers on.
bool qwen_layer_slides(const JsonReader& config, int64_t layer);

}  // namespace tessera
