#include "tessera/models/config.h"

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

TEST(ModelConfig, OldAndNewSpellingsMeanTheSame) {
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

TEST(ModelConfig, RopeScalingsReadTheirKeys) {
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

TEST(ModelConfig, SavingKeepsWhatItDoesNotKnow) {
  const auto saved = nlohmann::json::parse(parse("").to_json(at::kBFloat16));
  EXPECT_EQ(saved["house_key"], nlohmann::json::parse(R"({"kept": [1, 2.5, null]})"));
  EXPECT_EQ(saved["torch_dtype"], "bfloat16");
  EXPECT_EQ(saved["vocab_size"], 37);
}

TEST(ModelConfig, BadValuesNameKeyFoundAndWanted) {
  using testing::tiny_config;
  expect_error("{", ErrorKind::kFormat, "no valid JSON");
  expect_error(std::string(100'000, '['), ErrorKind::kFormat, "nested deeper");
  expect_error(tiny_config("\"x\": " + std::string(100'000, '[')), ErrorKind::kFormat, "nested deeper");
  expect_error("[]", ErrorKind::kFormat, "no JSON object");
  expect_error(R"({"architectures": ["GPT2LMHeadModel"]})", ErrorKind::kFormat,
               "Supported: LlamaForCausalLM, MistralForCausalLM");
  expect_error(R"({"architectures": []})", ErrorKind::kFormat, "architectures");
  expect_error(R"({"model_type": 3})", ErrorKind::kConfig, "model_type: found 3, wanted a string");
  expect_error(tiny_config(R"("num_attention_heads": 5, "head_dim": 4)"), ErrorKind::kConfig, "num_key_value_heads 2");
  expect_error(tiny_config(R"("num_attention_heads": 6)"), ErrorKind::kConfig, "no multiple of num_attention_heads 6");
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
  expect_error(tiny_config(R"("quantization_config": {"bits": 4})"), ErrorKind::kConfig, "quantization_config");
}

}  // namespace
}  // namespace tessera
