// A tiny Llama for tests. Its values depend only on the seed.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <string>

#include "tessera/models/decoder/causal_lm.h"
#include "tessera/models/files/weights.h"
#include "tests/support/ranks_device.h"

namespace tessera::testing {

inline std::string tiny_config(const std::string& changes = "") {
  // For other architectures `changes` may contain the model_type.
  const bool is_llama = changes.find("\"architectures\"") == std::string::npos;
  return R"({"architectures": ["LlamaForCausalLM"], )" + std::string(is_llama ? R"("model_type": "llama", )" : "") +
         R"("vocab_size": 37, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "initializer_range": 0.3, "torch_dtype": "float32", "rms_norm_eps": 1e-05,
    "house_key": {"kept": [1, 2.5, null]}, "bos_token_id": 1, "eos_token_id": [2, 3])" +
         (changes.empty() ? "" : ", " + changes) + "}";
}

inline std::string tiny_gemma3_changes() {
  return R"("architectures": ["Gemma3ForCausalLM"], "head_dim": 6, "sliding_window": 3, "query_pre_attn_scalar": 5,
    "layer_types": ["sliding_attention", "full_attention"], "final_logit_softcapping": 2.5)";
}

// The config of a Gemma3ForConditionalGeneration. Tokens 35 and 36 stand for an image.
inline std::string tiny_config_with_images() {
  return R"({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "image_token_index": 36,
    "boi_token_index": 35, "vision_config": {"hidden_size": 8}, "eos_token_id": [1, 30], "text_config": )" +
         tiny_config(tiny_gemma3_changes()) + "}";
}

inline std::shared_ptr<CausalLM> tiny_model(const std::string& changes = "", uint64_t seed = 5) {
  auto model = make_model(ModelConfig::parse(tiny_config(changes), "tiny"), {.device = at::kMeta});
  init_weights(*model, seed, test_device());
  return model;
}

inline at::Tensor tiny_tokens(int64_t rows, int64_t length) {
  return here(at::arange(rows * length, at::kLong).mul_(7919).remainder_(37).view({rows, length}));
}

// Labels: the token that follows each token. The last token of a row has no label.
inline at::Tensor next_labels(const at::Tensor& tokens) {
  auto labels = at::full_like(tokens, -100);
  labels.narrow(1, 0, tokens.size(1) - 1).copy_(tokens.narrow(1, 1, tokens.size(1) - 1));
  return labels;
}

}  // namespace tessera::testing
