// Llama: the decoder that the other families are told by. See decoder.h.
#pragma once

#include "tessera/models/config/family.h"

namespace tessera {

// Rows of DecoderLayers whose attention is as the config says: also what other families are made of.
std::shared_ptr<CausalLM> make_llama(const ModelConfig& config, const nn::ParameterOptions& options);
// base_model_tp_plan of LlamaConfig and others.
std::vector<PlanKeys::Style> llama_layer_styles();

const ModelFamily& llama_family();

}  // namespace tessera
