// Qwen3: a Llama with a norm over each head of queries and keys, and a head size of its own; layers may slide.
#pragma once

#include "tessera/models/config/family.h"

namespace tessera {

// llama_layer_styles, and what transformers says of q_norm and k_norm.
std::vector<PlanKeys::Style> normed_layer_styles();

const ModelFamily& qwen3_family();

}  // namespace tessera
