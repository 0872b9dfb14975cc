// The angles of rotary positions, with every scaling that config.json can ask for. Semantics of transformers'
// modeling_rope_utils, except that "dynamic" looks at this call's longest position alone, not at earlier calls.
//
//   auto [cos, sin] = rope_table(config, positions);      // positions int64 [B, T] -> fp32 [B, T, head_dim / 2]
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/models/config.h"

namespace tessera {

struct RopeFrequencies {
  at::Tensor inverse;     // fp32 [head_dim / 2], on the CPU
  double scaling = 1.0;   // of cos and sin
};
// sequence_length counts for the dynamic kind only.
RopeFrequencies rope_frequencies(const RopeConfig& rope, int64_t head_dim, int64_t max_position_embeddings,
                                 int64_t sequence_length);

struct RopeTable {
  at::Tensor cos, sin;
};
RopeTable rope_table(const ModelConfig& config, const at::Tensor& positions);

}  // namespace tessera
