#include "tessera/models/detail/gguf_llama.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "tessera/base/error.h"

namespace tessera::detail {

void check_llama_shape(const LlamaShape& shape, const std::string& where) {
  constexpr int64_t kMost = int64_t{1} << 24;
  const struct {
    const char* name;
    int64_t value, most;
  } numbers[] = {{"layers", shape.layers, 4096},
                 {"hidden size", shape.hidden, kMost},
                 {"feed-forward size", shape.ff, kMost},
                 {"heads", shape.heads, 65536},
                 {"key-value heads", shape.kv_heads, 65536},
                 {"head size", shape.head_dim, 65536},
                 {"vocabulary", shape.vocab, kMost}};
  for (const auto& number : numbers) {
    TESSERA_CHECK(number.value >= 1 && number.value <= number.most, ErrorKind::kFormat,
                  "[gguf] {}: {} is {}, wanted 1 to {}", where, number.name, number.value, number.most);
  }
  TESSERA_CHECK(shape.heads % shape.kv_heads == 0 && shape.head_dim % 2 == 0, ErrorKind::kFormat,
                "[gguf] {}: {} heads over {} key-value heads of size {} do not divide", where, shape.heads,
                shape.kv_heads, shape.head_dim);
}

std::vector<LlamaTensor> llama_tensors(const LlamaShape& shape) {
  const int64_t q = shape.heads * shape.head_dim, kv = shape.kv_heads * shape.head_dim;
  std::vector<LlamaTensor> all = {
      {"token_embd.weight", "model.embed_tokens.weight", {shape.vocab, shape.hidden}},
      {"output_norm.weight", "model.norm.weight", {shape.hidden}},
  };
  if (!shape.tied) all.push_back({"output.weight", "lm_head.weight", {shape.vocab, shape.hidden}});
  for (int64_t layer = 0; layer < shape.layers; ++layer) {
    const auto gguf = "blk." + std::to_string(layer) + ".", hf = "model.layers." + std::to_string(layer) + ".";
    const auto add = [&](const char* ours, const char* theirs, int64_t rows, int64_t columns, bool bias,
                         int64_t rotary_heads = 0) {
      all.push_back({gguf + ours + ".weight", hf + theirs + ".weight", {rows, columns}, rotary_heads});
      if (bias) all.push_back({gguf + ours + ".bias", hf + theirs + ".bias", {rows}, rotary_heads});
    };
    all.push_back({gguf + "attn_norm.weight", hf + "input_layernorm.weight", {shape.hidden}});
    add("attn_q", "self_attn.q_proj", q, shape.hidden, shape.attention_bias, shape.heads);
    add("attn_k", "self_attn.k_proj", kv, shape.hidden, shape.attention_bias, shape.kv_heads);
    add("attn_v", "self_attn.v_proj", kv, shape.hidden, shape.attention_bias);
    add("attn_output", "self_attn.o_proj", shape.hidden, q, shape.attention_bias);
    all.push_back({gguf + "ffn_norm.weight", hf + "post_attention_layernorm.weight", {shape.hidden}});
    add("ffn_gate", "mlp.gate_proj", shape.ff, shape.hidden, shape.mlp_bias);
    add("ffn_up", "mlp.up_proj", shape.ff, shape.hidden, shape.mlp_bias);
    add("ffn_down", "mlp.down_proj", shape.hidden, shape.ff, shape.mlp_bias);
  }
  return all;
}

namespace {

at::Tensor swap_rotary(const at::Tensor& tensor, int64_t heads, int64_t outer, int64_t inner) {
  return tensor.reshape({heads, outer, inner, -1}).transpose(1, 2).reshape(tensor.sizes());
}

}  // namespace

at::Tensor interleave_rotary_rows(const at::Tensor& tensor, int64_t heads) {
  return swap_rotary(tensor, heads, 2, tensor.size(0) / heads / 2);
}

at::Tensor split_rotary_rows(const at::Tensor& tensor, int64_t heads) {
  return swap_rotary(tensor, heads, tensor.size(0) / heads / 2, 2);
}

std::vector<float> llama3_divisors(const Llama3Scaling& scaling, double theta, int64_t head_dim) {
  std::vector<float> divisors;
  for (int64_t i = 0; i < head_dim; i += 2) {
    const double frequency = std::pow(theta, -static_cast<double>(i) / static_cast<double>(head_dim));
    const double turns = scaling.original_context * frequency / (2 * std::numbers::pi);  // within the old context
    double divisor = 1;
    if (turns < scaling.low_freq_factor) {
      divisor = scaling.factor;
    } else if (turns <= scaling.high_freq_factor) {
      const double smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor);
      divisor = 1 / ((1 - smooth) / scaling.factor + smooth);
    }
    divisors.push_back(static_cast<float>(divisor));
  }
  return divisors;
}

bool recover_llama3_scaling(const std::vector<float>& divisors, double theta, Llama3Scaling& scaling) {
  if (divisors.empty()) return false;
  scaling = {};
  scaling.factor = *std::max_element(divisors.begin(), divisors.end());
  const auto head_dim = static_cast<int64_t>(divisors.size()) * 2;
  // 8192 first: every released model has it, and short heads may not tell contexts apart.
  for (const double context :
       {8192., 4096., 2048., 1024., 512., 256., 128., 64., 32., 16384., 32768., 65536., 131072.}) {
    scaling.original_context = context;
    const auto tried = llama3_divisors(scaling, theta, head_dim);
    const bool fits = std::equal(tried.begin(), tried.end(), divisors.begin(),
                                 [](float a, float b) { return std::fabs(a - b) <= 1e-4F * std::fabs(a); });
    if (fits) return true;
  }
  return false;
}

}  // namespace tessera::detail
