#include "tessera/models/gguf/gguf_tensors.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "tessera/models/config/config.h"
#include "tessera/models/config/family.h"
#include "tessera/models/tensors/stacked_tensors.h"

namespace tessera {
namespace {

// Adds the tensors of one layer with their names in GGUF and in Hugging Face folders. Their shapes are computed from
// the config, so that the shapes in a file can be checked.
void add_layer_tensors(const GgufMap& map, const ModelConfig& config, int64_t layer, std::vector<GgufTensor>& all) {
  const auto gguf = fmt::format("blk.{}.", layer), hf = fmt::format("model.layers.{}.", layer);
  const auto norm = [&](const char* ours, const char* theirs, int64_t width) {
    all.push_back({gguf + ours + ".weight", hf + theirs + ".weight", {width}, 0, map.norms_plus_one});
  };
  const auto linear = [&](const char* ours, const char* theirs, int64_t rows, int64_t columns, bool bias,
                          int64_t rotary_heads = 0) {
    all.push_back({gguf + ours + ".weight", hf + theirs + ".weight", {rows, columns}, rotary_heads});
    if (bias) all.push_back({gguf + ours + ".bias", hf + theirs + ".bias", {rows}, rotary_heads});
  };
  const int64_t hidden = config.hidden_size, heads = config.num_attention_heads, kv_heads = config.num_key_value_heads;
  const int64_t q = heads * config.head_dim, kv = kv_heads * config.head_dim;
  const int64_t rotary = map.interleaved_rotary ? 1 : 0;
  norm("attn_norm", "input_layernorm", hidden);
  linear("attn_q", "self_attn.q_proj", q, hidden, config.qkv_bias, rotary * heads);
  linear("attn_k", "self_attn.k_proj", kv, hidden, config.qkv_bias, rotary * kv_heads);
  linear("attn_v", "self_attn.v_proj", kv, hidden, config.qkv_bias);
  linear("attn_output", "self_attn.o_proj", hidden, q, config.output_bias);
  if (map.qk_norm) {
    norm("attn_q_norm", "self_attn.q_norm", config.head_dim);
    norm("attn_k_norm", "self_attn.k_norm", config.head_dim);
  }
  if (map.has_post_norms) {
    norm("post_attention_norm", "post_attention_layernorm", hidden);
    norm("post_ffw_norm", "post_feedforward_layernorm", hidden);
  }
  norm("ffn_norm", map.has_post_norms ? "pre_feedforward_layernorm" : "post_attention_layernorm", hidden);
  if (!map.experts) {
    const int64_t inner = config.intermediate_size;
    linear("ffn_gate", "mlp.gate_proj", inner, hidden, config.mlp_bias);
    linear("ffn_up", "mlp.up_proj", inner, hidden, config.mlp_bias);
    linear("ffn_down", "mlp.down_proj", hidden, inner, config.mlp_bias);
    return;
  }
  const int64_t inner = config.experts.intermediate_size, count = config.experts.num_experts;
  const auto stack = [&](const char* ours, const char* theirs, int64_t rows, int64_t columns, int64_t first_row,
                         int64_t stack_rows) {
    all.push_back({.gguf_name = gguf + ours + ".weight",
                   .hf_name = hf + theirs,
                   .shape = {count, rows, columns},
                   .stacks = &family_of(config.architecture).weights,
                   .first_row = first_row,
                   .stack_rows = stack_rows});
  };
  linear("ffn_gate_inp", "mlp.gate", count, hidden, /*bias=*/false);
  all.back().router = true;
  // Hugging Face stacks gate and up in one parameter: gate has the first `inner` rows, up the rows after them.
  stack("ffn_gate_exps", "mlp.experts.gate_up_proj", inner, hidden, 0, 2 * inner);
  stack("ffn_up_exps", "mlp.experts.gate_up_proj", inner, hidden, inner, 2 * inner);
  stack("ffn_down_exps", "mlp.experts.down_proj", hidden, inner, 0, hidden);
}

// Views the rows of each head as [outer, inner] and exchanges these two dims.
at::Tensor swap_rotary(const at::Tensor& tensor, int64_t heads, int64_t outer, int64_t inner) {
  return tensor.reshape({heads, outer, inner, -1}).transpose(1, 2).reshape(tensor.sizes());
}

}  // namespace

std::vector<GgufTensor> gguf_tensors(const GgufMap& map, const ModelConfig& config) {
  const int64_t vocab = config.vocab_size, hidden = config.hidden_size;
  std::vector<GgufTensor> all = {
      {"token_embd.weight", "model.embed_tokens.weight", {vocab, hidden}},
      {"output_norm.weight", "model.norm.weight", {hidden}, 0, map.norms_plus_one},
  };
  if (!config.tie_word_embeddings) all.push_back({"output.weight", "lm_head.weight", {vocab, hidden}});
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) add_layer_tensors(map, config, layer, all);
  return all;
}

std::vector<std::string> names_of_experts(const GgufTensor& tensor, const std::string& stack_name) {
  std::vector<std::string> names;
  const auto& shape = tensor.shape;
  for (auto& each : stacked_tensors(*tensor.stacks, stack_name, {shape[0], tensor.stack_rows, shape[2]})) {
    if (each.first_row == tensor.first_row) names.push_back(std::move(each.name));
  }
  return names;
}

at::Tensor to_gguf(const GgufTensor& tensor, const at::Tensor& value) {
  if (tensor.one_plus) return value.to(at::kFloat) + 1;
  return tensor.rotary_heads > 0 ? interleave_rotary_rows(value, tensor.rotary_heads) : value;
}

at::Tensor from_gguf(const GgufTensor& tensor, const at::Tensor& value) {
  if (tensor.one_plus) return value.to(at::kFloat) - 1;
  return tensor.rotary_heads > 0 ? split_rotary_rows(value, tensor.rotary_heads) : value;
}

at::Tensor interleave_rotary_rows(const at::Tensor& tensor, int64_t heads) {
  return swap_rotary(tensor, heads, 2, tensor.size(0) / heads / 2);
}

at::Tensor split_rotary_rows(const at::Tensor& tensor, int64_t heads) {
  return swap_rotary(tensor, heads, tensor.size(0) / heads / 2, 2);
}

}  // namespace tessera
