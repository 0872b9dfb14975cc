// The ModelFamily objects of the families whose models use the DecoderLayer of models/decoder/decoder.h as it is, and
// functions that several families share. Gemma3 has layers of its own and its own header.
#pragma once

#include "tessera/models/config/family.h"

namespace tessera {

const ModelFamily& llama_family();
const ModelFamily& mistral_family();
const ModelFamily& qwen2_family();
const ModelFamily& qwen3_family();
const ModelFamily& qwen3_moe_family();

// Makes a decoder of DecoderLayers whose attention is that of the config.
std::shared_ptr<CausalLM> make_llama(const ModelConfig& config, const nn::ParameterOptions& options);
// Returns base_model_tp_plan of LlamaConfig and others.
std::vector<PlanKeys::Style> llama_layer_styles();
// Returns llama_layer_styles() with transformers' styles of q_norm and k_norm added.
std::vector<PlanKeys::Style> normed_layer_styles();
// WindowKeys::layer_slides of the Qwen families: layers from max_window_layers on slide.
bool qwen_layer_slides(const JsonReader& config, int64_t layer);

}  // namespace tessera
