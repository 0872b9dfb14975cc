// Rotary position angles, with every rope type that config.json supports. The semantics are those of transformers'
// modeling_rope_utils, with one difference: "dynamic" uses the largest position of the present call only, not of
// earlier calls.
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
  double scaling = 1.0;  // factor of cos and sin
};
// `sequence_length` is used by the rope type "dynamic" only.
RopeFrequencies rope_frequencies(const RopeConfig& rope, int64_t head_dim, int64_t max_position_embeddings,
                                 int64_t sequence_length);

// A child module of every model, called with the hidden states and the positions as in transformers. It has no
// parameters.
struct RotaryEmbedding : nn::Callable<RotaryEmbedding> {
  RotaryEmbedding(const RopeConfig& rope, int64_t head_dim, int64_t max_position_embeddings);
  // Returns the rotary angles of the positions. `x` only selects the device of the angles; its values are not read.
  // When `positions` is a DTensor, the angles are DTensors with the same placements; with the rope type "dynamic" the
  // call is then COLLECTIVE over their mesh.
  virtual nn::RotaryAngles forward(const at::Tensor& x, const at::Tensor& positions);
  // Returns the angles for tokens of several sequences. `lengths` has the shape of `positions`. For each token, the
  // rope type "dynamic" uses the token's entry of `lengths` as the sequence length, in place of the largest position of
  // the call. The angles of a token do not depend on other tokens.
  nn::RotaryAngles forward_by_lengths(const at::Tensor& x, const at::Tensor& positions, const at::Tensor& lengths);
  bool is_dynamic() const { return rope_.kind == RopeKind::kDynamic; }

 private:
  RopeConfig rope_;
  int64_t head_dim_, max_position_embeddings_;
  RopeFrequencies cached_;  // frequencies on the device of the last call; unused by the dynamic kind
};

}  // namespace tessera
