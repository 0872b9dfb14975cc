// The ModelFamily objects of the families whose models use DecoderLayer (models/decoder/decoder.h) without changes, and
// functions that several families share. Gemma3 has its own layer class, in gemma3.h.
#pragma once

#include "tessera/models/config/family.h"

namespace tessera {

const ModelFamily& llama_family();
const ModelFamily& mistral_family();
const ModelFamily& qwen2_family();
const ModelFamily& qwen3_family();
const ModelFamily& qwen3_moe_family();

// Makes a DecoderForCausalLM of DecoderLayers with the attention options of the config.
std::shared_ptr<CausalLM> make_llama(const ModelConfig& config, const nn::ParameterOptions& options);
// Returns base_model_tp_plan of transformers' LlamaConfig; MistralConfig and Qwen2Config have the same plan.
std::vector<PlanKeys::Style> llama_layer_styles();
// Returns llama_layer_styles() with transformers' styles of q_norm and k_norm added.
std::vector<PlanKeys::Style> normed_layer_styles();
// WindowKeys::layer_slides of the Qwen families: a layer has a sliding window if its index is at least
// max_window_layers.
bool qwen_layer_slides(const JsonReader& config, int64_t layer);

}  // namespace tessera
