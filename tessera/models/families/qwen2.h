// Qwen2 and Qwen2.5: a Llama whose queries, keys and values have a bias; layers may slide.
#pragma once

#include "tessera/models/config/family.h"

namespace tessera {

// WindowKeys::slides of the Qwen families: the layers from max_window_layers on.
bool qwen_layer_slides(const JsonReader& config, int64_t layer);

const ModelFamily& qwen2_family();

}  // namespace tessera
