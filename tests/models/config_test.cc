// Tests of ModelConfig, the reader of config.json: spellings, defaults, rotary scaling, windows, unknown keys and
// errors.
#include "tessera/models/config/config.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tests/models/tiny.h"

namespace tessera {
namespace {

ModelConfig parse(const std::string& changes) { return ModelConfig::parse(testing::tiny_config(changes), "t"); }

void expect_error(const std::string& text, ErrorKind kind, const std::string& part) {
  try {
    ModelConfig::parse(text, "dir/config.json");
    FAIL() << "accepted: " << text;
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(error.kind(), kind) << message;
    EXPECT_NE(message.find(part), std::string::npos) << message;
    EXPECT_NE(message.find("dir/config.json"), std::string::npos) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }
}

TEST(ModelConfig, OldAndNewKeysAreEquivalent) {
  const auto old_style = parse(R"("rope_theta": 5000, "rope_scaling": {"type": "linear", "factor": 2})");
  const auto new_style = parse(R"("rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0})");
  for (const auto& config : {old_style, new_style}) {
    EXPECT_EQ(config.rope.kind, RopeKind::kLinear);
    EXPECT_EQ(config.rope.theta, 5000);
    EXPECT_EQ(config.rope.factor, 2);
    EXPECT_EQ(config.dtype, at::kFloat);
  }
  EXPECT_EQ(ModelConfig::parse(R"({"model_type": "llama", "dtype": "bfloat16"})", "t").dtype, at::kBFloat16);
  EXPECT_EQ(ModelConfig::parse(R"({"model_type": "llama", "torch_dtype": "torch.float16"})", "t").dtype, at::kHalf);
}

TEST(ModelConfig, AnEmptyRopeScalingCountsAsAbsent) {
  for (const char* family : {"Llama", "Mistral", "Qwen2", "Qwen3"}) {
    for (const char* empty : {"{}", "null"}) {
      const auto config = parse(fmt::format(R"("architectures": ["{}ForCausalLM"], "rope_scaling": {},
          "rope_parameters": {{"rope_type": "linear", "factor": 2, "rope_theta": 1e6}})",
                                            family, empty));
      EXPECT_EQ(config.rope.theta, 1e6) << family;
      EXPECT_EQ(config.rope.kind, RopeKind::kLinear) << family;
    }
  }
  const auto neither = parse(R"("rope_scaling": {}, "rope_parameters": {}, "rope_theta": 7000)");
  EXPECT_EQ(neither.rope.theta, 7000);
  const auto gemma = ModelConfig::parse(R"({"model_type": "gemma3_text", "rope_scaling": {}, "rope_parameters": {
      "full_attention": {"rope_type": "linear", "factor": 8.0}}})",
                                        "t");
  EXPECT_EQ(gemma.rope.kind, RopeKind::kLinear);
}

TEST(ModelConfig, ConflictingKeysResolveAsInTransformers) {
  const auto both = parse(R"("rope_scaling": {"rope_type": "linear", "factor": 2}, "rope_theta": 300,
      "rope_parameters": {"rope_type": "linear", "factor": 3, "rope_theta": 500})");
  EXPECT_EQ(both.rope.factor, 2);
  EXPECT_EQ(both.rope.theta, 300) << "rope_scaling replaces the whole object";
  const auto gemma =
      ModelConfig::parse(R"({"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 2},
      "rope_parameters": {"full_attention": {"rope_type": "default", "factor": 3, "rope_theta": 500}}})",
                         "t");
  EXPECT_EQ(gemma.rope.kind, RopeKind::kLinear);
  EXPECT_EQ(gemma.rope.factor, 2);
  EXPECT_EQ(gemma.rope.theta, 500) << "rope_scaling is merged into the object";
  EXPECT_EQ(parse(R"("architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_local_experts": 16)")
                .experts.num_experts,
            16);
  EXPECT_EQ(parse(R"("torch_dtype": "float16", "dtype": "bfloat16")").dtype, at::kBFloat16);
}

TEST(ModelConfig, ContextLengthFollowsRopeScaling) {
  const auto context = [](const std::string& scaling) { return parse(R"("rope_scaling": )" + scaling).context_tokens; };
  EXPECT_EQ(context("null"), 64);
  EXPECT_EQ(context(R"({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 40})"), 160);
  EXPECT_EQ(context(R"({"rope_type": "yarn", "factor": 4})"), 256);
  EXPECT_EQ(context(R"({"rope_type": "dynamic", "factor": 2.5})"), 160);
  EXPECT_EQ(context(R"({"type": "linear", "factor": 2})"), 128);
  EXPECT_EQ(context(R"({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
      "original_max_position_embeddings": 16})"),
            64);
  const auto gemma =
      ModelConfig::parse(R"({"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8}})", "t");
  EXPECT_EQ(gemma.context_tokens, 131'072) << "its max_position_embeddings is scaled already";
}

TEST(ModelConfig, RopeScalingKeysAreParsed) {
  const auto llama3 = parse(R"("rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
      "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}, "rope_theta": 500000.0)");
  EXPECT_EQ(llama3.rope.kind, RopeKind::kLlama3);
  EXPECT_EQ(llama3.rope.original_max_position_embeddings, 8192);
  EXPECT_EQ(llama3.rope.theta, 500000.0);
  const auto yarn = parse(R"("rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 16})");
  EXPECT_EQ(yarn.rope.factor, 4.0) << "the ratio of the context lengths";
  EXPECT_EQ(parse(R"("rope_scaling": null)").rope.kind, RopeKind::kDefault);
}

TEST(ModelConfig, DefaultsAreThoseOfTheFamily) {
  const auto llama = ModelConfig::parse(R"({"model_type": "llama"})", "t");
  EXPECT_EQ(llama.intermediate_size, 11008);
  EXPECT_EQ(llama.num_key_value_heads, 32);
  EXPECT_EQ(llama.eos_token_ids, std::vector<int64_t>{2});
  const auto mistral = ModelConfig::parse(
      R"({"architectures": ["MistralForCausalLM"], "sliding_window": 4096, "eos_token_id": null})", "t");
  EXPECT_EQ(mistral.num_key_value_heads, 8);
  EXPECT_EQ(mistral.sliding_window, 4096);
  EXPECT_TRUE(mistral.eos_token_ids.empty());
}

TEST(ModelConfig, SlidingWindowsOfLayersFollowTheConfig) {
  const auto mistral = ModelConfig::parse(R"({"model_type": "mistral"})", "t");
  EXPECT_EQ(mistral.sliding_window_of_layer(31), 4096) << "left out, the key has a value";
  EXPECT_EQ(ModelConfig::parse(R"({"model_type": "mistral", "sliding_window": null})", "t").sliding_window_of_layer(0),
            0);
  const auto off = ModelConfig::parse(R"({"model_type": "qwen2", "sliding_window": 7, "max_window_layers": 0})", "t");
  EXPECT_EQ(off.sliding_window_of_layer(31), 0);
  const auto on = ModelConfig::parse(R"({"model_type": "qwen3", "use_sliding_window": true})", "t");
  EXPECT_EQ(on.sliding_window_of_layer(27), 0);
  EXPECT_EQ(on.sliding_window_of_layer(28), 4096);
  const std::string mistral_types =
      R"({"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": 8, "layer_types": )";
  const auto mixed = ModelConfig::parse(mistral_types + R"(["full_attention", "sliding_attention"]})", "t");
  EXPECT_EQ(mixed.sliding_window_of_layer(0), 0) << "as MinistralForCausalLM, which transformers makes of it";
  EXPECT_EQ(mixed.sliding_window_of_layer(1), 8);
  EXPECT_EQ(ModelConfig::parse(mistral_types + R"(["full_attention", "attention"]})", "t").sliding_window_of_layer(1),
            0);
  EXPECT_EQ(ModelConfig::parse(mistral_types + "null}", "t").sliding_window_of_layer(0), 8);
  const auto gemma = ModelConfig::parse(R"({"model_type": "gemma3_text", "sliding_window": 512})", "t");
  EXPECT_EQ(gemma.sliding_window_of_layer(0), 512);
  EXPECT_EQ(gemma.sliding_window_of_layer(5), 0);
  const auto pattern = ModelConfig::parse(R"({"model_type": "gemma3_text", "sliding_window_pattern": 2})", "t");
  EXPECT_EQ(pattern.sliding_window_of_layer(0), 4096);
  EXPECT_EQ(pattern.sliding_window_of_layer(1), 0);
}

TEST(ModelConfig, Gemma3RopeBasesInOldAndNewKeysAreEquivalent) {
  const auto old_style =
      ModelConfig::parse(R"({"model_type": "gemma3_text", "rope_theta": 5e5, "rope_local_base_freq": 300,
      "rope_scaling": {"rope_type": "linear", "factor": 8.0}})",
                         "t");
  const auto new_style = ModelConfig::parse(R"({"model_type": "gemma3_text", "rope_parameters": {
      "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
      "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}})",
                                            "t");
  for (const auto& config : {old_style, new_style}) {
    EXPECT_EQ(config.rope.kind, RopeKind::kLinear);
    EXPECT_EQ(config.rope.factor, 8);
    EXPECT_EQ(config.rope.theta, 5e5);
    ASSERT_TRUE(config.local_rope);
    EXPECT_EQ(config.local_rope->kind, RopeKind::kDefault);
    EXPECT_EQ(config.local_rope->theta, 300);
  }
  const auto plain = ModelConfig::parse(R"({"model_type": "gemma3_text"})", "t");
  EXPECT_EQ(plain.rope.theta, 1e6);
  EXPECT_EQ(plain.local_rope->theta, 1e4);
  EXPECT_EQ(plain.query_pre_attn_scalar, 256);
  EXPECT_EQ(plain.activation, nn::Activation::kGeluTanh);
  EXPECT_TRUE(plain.tie_word_embeddings);
}

TEST(ModelConfig, MultimodalModelReadsTextConfig) {
  const auto config =
      ModelConfig::parse(R"({"model_type": "gemma3", "eos_token_id": [1, 106], "torch_dtype": "bfloat16",
      "num_hidden_layers": 3, "text_config": {"num_hidden_layers": 2, "hidden_size": 8, "torch_dtype": "float32"}})",
                         "t");
  EXPECT_EQ(config.num_hidden_layers, 2);
  EXPECT_EQ(config.vocab_size, 262208);
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_EQ(config.dtype, at::kBFloat16);
  EXPECT_EQ(config.eos_token_ids, (std::vector<int64_t>{1, 106}));
  EXPECT_EQ(config.image_token_ids, (std::vector<int64_t>{262144, 255999}));
  const auto saved = nlohmann::json::parse(config.to_json(at::kHalf));
  EXPECT_EQ(saved["torch_dtype"], "float16");
  EXPECT_EQ(saved["text_config"]["torch_dtype"], "float16");
  EXPECT_EQ(saved["num_hidden_layers"], 3);
}

TEST(ModelConfig, SavingKeepsUnknownKeys) {
  const auto saved = nlohmann::json::parse(parse("").to_json(at::kBFloat16));
  EXPECT_EQ(saved["house_key"], nlohmann::json::parse(R"({"kept": [1, 2.5, null]})"));
  EXPECT_EQ(saved["torch_dtype"], "bfloat16");
  EXPECT_EQ(saved["vocab_size"], 37);
}

TEST(ModelConfig, InvalidValuesReportKeyFoundAndExpected) {
  using testing::tiny_config;
  expect_error("{", ErrorKind::kFormat, "no valid JSON");
  expect_error(std::string(100'000, '['), ErrorKind::kFormat, "nested deeper");
  expect_error(tiny_config("\"x\": " + std::string(100'000, '[')), ErrorKind::kFormat, "nested deeper");
  expect_error("[]", ErrorKind::kFormat, "not a JSON object");
  expect_error(
      R"({"architectures": ["GPT2LMHeadModel"]})", ErrorKind::kFormat,
      "Supported: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM, ");
  expect_error(R"({"architectures": []})", ErrorKind::kFormat, "architecture '' is not supported");
  expect_error(R"({"architectures": [3]})", ErrorKind::kFormat, "architectures");
  expect_error(R"({"model_type": 3})", ErrorKind::kConfig, "model_type: found 3, wanted a string");
  expect_error(tiny_config(R"("num_attention_heads": 5, "head_dim": 4)"), ErrorKind::kConfig, "num_key_value_heads 2");
  expect_error(tiny_config(R"("num_attention_heads": 6)"), ErrorKind::kConfig,
               "not a multiple of num_attention_heads 6");
  expect_error(tiny_config(R"("head_dim": 5)"), ErrorKind::kConfig, "head_dim 5 is odd");
  expect_error(tiny_config(R"("vocab_size": -1)"), ErrorKind::kConfig, "vocab_size: found -1");
  expect_error(tiny_config(R"("vocab_size": "many")"), ErrorKind::kConfig, R"(vocab_size: found "many")");
  expect_error(tiny_config(R"("vocab_size": 1e300)"), ErrorKind::kConfig, "vocab_size");
  expect_error(tiny_config(R"("hidden_size": 18446744073709551615)"), ErrorKind::kConfig, "hidden_size");
  expect_error(tiny_config(R"("num_hidden_layers": 1000000000)"), ErrorKind::kConfig, "num_hidden_layers");
  expect_error(tiny_config(R"("vocab_size": 2000000000, "hidden_size": 2000000000)"), ErrorKind::kConfig, "too large");
  expect_error(tiny_config(R"("rms_norm_eps": null, "rms_norm_eps": -1)"), ErrorKind::kConfig, "rms_norm_eps");
  expect_error(tiny_config(R"("hidden_act": "gelu")"), ErrorKind::kConfig, "hidden_act 'gelu'");
  expect_error(tiny_config(R"("rope_scaling": {"type": "longrope", "factor": 2})"), ErrorKind::kConfig, "'longrope'");
  expect_error(tiny_config(R"("rope_scaling": {"type": "linear"})"), ErrorKind::kConfig, "factor is missing");
  expect_error(tiny_config(R"("rope_scaling": [])"), ErrorKind::kConfig, "rope_scaling");
  expect_error(tiny_config(R"("attention_bias": 1)"), ErrorKind::kConfig, "attention_bias: found 1");
  expect_error(tiny_config(R"("dtype": "int4")"), ErrorKind::kConfig, "'int4'");
  expect_error(tiny_config(R"("eos_token_id": "x")"), ErrorKind::kConfig, "eos_token_id");
  expect_error(tiny_config(R"("eos_token_id": 1000000000000)"), ErrorKind::kConfig,
               "eos_token_id: found 1000000000000, wanted an integer from 0 to 36");
  expect_error(tiny_config(R"("eos_token_id": [2, 37])"), ErrorKind::kConfig, "eos_token_id[1]: found 37");
  expect_error(tiny_config(R"("pad_token_id": 37)"), ErrorKind::kConfig, "pad_token_id: found 37");
  expect_error(tiny_config(R"("hidden_act": "\u001b[31m")"), ErrorKind::kConfig, "hidden_act '\\x1b[31m'");
  const auto gemma = [](const std::string& changes) {
    return tiny_config(R"("architectures": ["Gemma3ForCausalLM"], )" + changes);
  };
  expect_error(gemma(R"("layer_types": ["full_attention"])"), ErrorKind::kConfig, "layer_types: found 1 types");
  expect_error(gemma(R"("layer_types": ["full_attention", "chunked"])"), ErrorKind::kConfig,
               "layer_types[1]: found 'chunked'");
  expect_error(gemma(R"("sliding_window": null, "layer_types": ["full_attention", "sliding_attention"])"),
               ErrorKind::kConfig, "without a sliding_window");
  expect_error(gemma(R"("query_pre_attn_scalar": 0)"), ErrorKind::kConfig, "query_pre_attn_scalar: found 0");
  expect_error(gemma(R"("final_logit_softcapping": -1)"), ErrorKind::kConfig, "final_logit_softcapping: found -1");
  expect_error(gemma(R"("hidden_activation": "relu")"), ErrorKind::kConfig, "hidden_activation 'relu'");
  expect_error(gemma(R"("use_bidirectional_attention": true)"), ErrorKind::kConfig, "use_bidirectional_attention");
  expect_error(gemma(R"("rope_parameters": [])"), ErrorKind::kConfig, "rope_parameters: found");
  expect_error(gemma(R"("rope_parameters": {"sliding_attention": {"rope_type": "linear"}})"), ErrorKind::kConfig,
               "factor is missing");
  expect_error(R"({"model_type": "gemma3", "text_config": 7})", ErrorKind::kConfig, "text_config: found 7");
  expect_error(tiny_config(R"("quantization_config": {"bits": 4})"), ErrorKind::kConfig, "quantization_config");
  expect_error(tiny_config(R"("per_layer_config": {"0": {"rms_norm_eps": 0.1}})"), ErrorKind::kConfig,
               "per_layer_config");
  expect_error(tiny_config(R"("transformers_weights": "other.safetensors")"), ErrorKind::kConfig,
               "transformers_weights");
  expect_error(tiny_config(R"("is_causal": false)"), ErrorKind::kConfig, "is_causal");
  expect_error(tiny_config(R"("model_type": "qwen2")"), ErrorKind::kConfig,
               "model_type 'qwen2' does not belong to architecture LlamaForCausalLM");
  expect_error(tiny_config(R"("rope_parameters": {"full_attention": {"rope_theta": 5}})"), ErrorKind::kConfig,
               "full_attention");
  expect_error(R"({"model_type": "mistral", "sliding_window": 0})", ErrorKind::kConfig, "sliding_window: found 0");
  expect_error(gemma(R"("sliding_window": null)"), ErrorKind::kConfig, "sliding_window is null");
  expect_error(gemma(R"("sliding_window": 3, "_sliding_window_pattern": 2)"), ErrorKind::kConfig, "layer_types");
  expect_error(gemma(R"("sliding_window": 3, "rope_scaling": {"type": "linear", "factor": 2})"), ErrorKind::kConfig,
               "rope_scaling: type");
}

TEST(ModelConfig, ExpertLayersFollowTheConfig) {
  const std::string moe = R"("architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 4, )";
  const auto layers = [&](const std::string& changes) { return parse(moe + changes).experts.layer_has_experts; };
  EXPECT_EQ(layers(R"("num_experts": 8)"), (std::vector<bool>{true, true, true, true}));
  EXPECT_EQ(layers(R"("num_experts": 8, "decoder_sparse_step": 2)"), (std::vector<bool>{false, true, false, true}));
  EXPECT_EQ(layers(R"("num_local_experts": 8, "num_experts": 0, "mlp_only_layers": [0, 3], "decoder_sparse_step": 2)"),
            (std::vector<bool>{false, true, false, false}));
  EXPECT_EQ(layers(R"("num_experts": 0)"), std::vector<bool>{});
  const auto experts = parse(moe + R"("num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 5,
      "norm_topk_prob": true, "output_router_logits": true, "router_aux_loss_coef": 0.5)")
                           .experts;
  EXPECT_EQ(experts.num_experts, 9);
  EXPECT_EQ(experts.num_experts_per_tok, 3);
  EXPECT_EQ(experts.intermediate_size, 5);
  EXPECT_TRUE(experts.norm_topk_prob && experts.adds_balance_loss);
  EXPECT_EQ(experts.balance_coefficient, 0.5);
  EXPECT_EQ(parse("").experts.num_experts, 0);
  using testing::tiny_config;
  expect_error(tiny_config(moe + R"("num_experts": 4, "num_experts_per_tok": 5)"), ErrorKind::kConfig,
               "num_experts_per_tok 5 is more than the 4 experts");
  expect_error(tiny_config(moe + R"("num_experts": 100000)"), ErrorKind::kConfig, "num_experts");
  expect_error(tiny_config(moe + R"("num_experts": 4096, "moe_intermediate_size": 2000000000, "hidden_size": 400000)"),
               ErrorKind::kConfig, "too large");
  expect_error(tiny_config(moe + R"("decoder_sparse_step": 0)"), ErrorKind::kConfig, "decoder_sparse_step");
}

}  // namespace
}  // namespace tessera
