// The angles of rotary positions, with every scaling that config.json can ask for. Semantics of transformers'
// modeling_rope_utils, except that "dynamic" looks at this call's longest position alone, not at calls for earlier
// sequences.
//
//   RotaryEmbedding rotary_emb(config.rope, config.head_dim, config.max_position_embeddings);
//   auto [cos, sin] = rotary_emb(x, positions);       // positions int64 [B, T] -> fp32 [B, T, head_dim / 2]
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/models/config/config.h"
#include "tessera/nn/attention/attention.h"
#include "tessera/nn/module.h"

namespace tessera {

struct RopeFrequencies {
  at::Tensor inverse;    // fp32 [head_dim / 2], on the CPU
  double scaling = 1.0;  // of cos and sin
};
// sequence_length counts for the dynamic kind only.
RopeFrequencies rope_frequencies(const RopeConfig& rope, int64_t head_dim, int64_t max_position_embeddings,
                                 int64_t sequence_length);

// A child of every model, called with the hidden states and the positions as in transformers. Holds no parameters.
struct RotaryEmbedding : nn::Callable<RotaryEmbedding> {
  RotaryEmbedding(const RopeConfig& rope, int64_t head_dim, int64_t max_position_embeddings);
  // x: any tensor where the angles are wanted; its values do not count. Of positions that are a DTensor the angles are
  // one too, placed alike; the dynamic kind then is COLLECTIVE over their mesh.
  virtual nn::RotaryAngles forward(const at::Tensor& x, const at::Tensor& positions);
  // The same for rows of several sequences: `lengths`, shaped as the positions, is for each the length that the dynamic
  // kind takes in place of the longest position. A row's angles do not depend on other rows.
  nn::RotaryAngles forward_by_lengths(const at::Tensor& x, const at::Tensor& positions, const at::Tensor& lengths);
  bool is_dynamic() const { return rope_.kind == RopeKind::kDynamic; }

 private:
  RopeConfig rope_;
  int64_t head_dim_, max_position_embeddings_;
  RopeFrequencies kept_;  // unless they depend on what comes; on the device that asked last
};

}  // namespace tessera
