// Tests of models with a packed base against bitsandbytes and the gguf package.
#include <gmock/gmock.h>

#include "tessera/base/error.h"
#include "tessera/formats/safetensors/safetensors.h"
#include "tessera/models/adapters/adapters.h"
#include "tessera/models/files/weights.h"
#include "tessera/nn/linear/quantized_linear.h"
#include "tests/models/tiny.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

std::shared_ptr<CausalLM> packed_model(const ModelConfig& config, const nn::QuantizeOptions& how,
                                       const std::filesystem::path& weights) {
  auto model = make_model(config, {.device = at::kMeta});
  nn::quantize_linears(*model, how);
  add_adapters(*model, {.rank = 2, .target_modules = {"q_proj", "down_proj"}});
  load_pretrained(*model, weights);
  init_adapters(*model, 3);
  return model;
}

void expect_merged_as_plain(CausalLM& packed, CausalLM& plain, const std::filesystem::path& folder) {
  const at::NoGradGuard no_grad;
  for (const auto& [path, linear] : adapted_linears(packed)) linear->lora_B->weight.fill_(0.02);
  save_pretrained(packed, folder / "merged", {}, {.merge_adapters = true});
  save_pretrained(packed, folder / "base", {});
  const auto tokens = testing::tiny_tokens(2, 9).remainder(32);
  const auto logits = packed.logits({.tokens = tokens});
  EXPECT_TRUE(from_pretrained(folder / "merged")->logits({.tokens = tokens}).allclose(logits, 1e-4, 1e-4));
  EXPECT_TRUE(from_pretrained(folder / "base")
                  ->logits({.tokens = tokens})
                  .allclose(plain.logits({.tokens = tokens}), 1e-5, 1e-5));
}

TEST(QuantizedBaseOracle, Nf4EqualsBitsandbytesAndGgufBlocksEqualTheGgufPackage) {
  TESSERA_CPU_ONLY("weights are packed on the CPU");
  const testing::TempFolder folder;
  const auto run = testing::run_python("tests/models/oracle/quantized_weights.py", {folder.path().string()});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const auto file = SafetensorsFile::open(folder / "nf4.safetensors");
  const auto code = file->tensor("code");
  for (int64_t i = 0; i < 16; ++i) EXPECT_EQ(code[i].item<float>(), kernels::nf4_values()[static_cast<size_t>(i)]);
  for (const std::string name : {"even", "large", "broken"}) {
    const auto of = [&](const std::string& key) { return file->tensor(name + "." + key); };
    const auto once = kernels::QuantizedWeight::nf4(of("weight")),
               twice = kernels::QuantizedWeight::nf4(of("weight"), {true});
    EXPECT_TRUE(once.absmax().equal(of("absmax"))) << name;
    EXPECT_TRUE(once.packed().equal(of("packed"))) << name;
    EXPECT_TRUE(once.values().allclose(of("values"), 1e-6, 1e-9)) << name;
    EXPECT_TRUE(twice.absmax().allclose(of("twice.absmax"), 1e-5, 1e-8)) << name;
    EXPECT_TRUE(twice.values().allclose(of("twice.values"), 1e-5, 1e-8)) << name;
  }

  const auto plain = from_pretrained(folder / "folder");
  const auto tokens = testing::tiny_tokens(2, 9).remainder(32);
  const auto wanted = plain->logits({.tokens = tokens});
  const auto& config = plain->config();
  const auto blocks = packed_model(config, {.format = nn::Quantization::kGguf}, folder / "model.gguf");
  EXPECT_TRUE(blocks->logits({.tokens = tokens}).allclose(wanted, 1e-4, 1e-4));
  for (const auto& [name, packed] : nn::packed_weights(*blocks)) {
    EXPECT_TRUE(packed->weight.values().equal(SafetensorsFile::open(folder / "folder/model.safetensors")->tensor(name)))
        << name;
  }
  expect_merged_as_plain(*blocks, *plain, folder.path());
  // Without packing, the same GGUF file is loaded as decoded values.
  const auto decoded = make_model(config, {.device = at::kMeta});
  load_pretrained(*decoded, folder / "model.gguf");
  EXPECT_TRUE(decoded->logits({.tokens = tokens}).equal(wanted));

  const auto error = [&](const std::string& changes, const nn::QuantizeOptions& how, const char* weights) {
    try {
      packed_model(ModelConfig::parse(testing::tiny_config(changes), "tiny"), how, folder / weights);
    } catch (const Error& failed) {
      return std::string(failed.what());
    }
    return std::string("no error");
  };
  const std::string same = R"("vocab_size": 32, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
      "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": true)";
  EXPECT_EQ(error(same, {.format = nn::Quantization::kGguf}, "model.gguf"), "no error");
  EXPECT_THAT(error(same, {.format = nn::Quantization::kGguf}, "folder"),
              HasSubstr("wanted the blocks of a GGUF file"));
  EXPECT_THAT(error("", {.format = nn::Quantization::kGguf}, "model.gguf"), HasSubstr("config.json wants ["));
  EXPECT_THAT(error(testing::tiny_gemma3_changes(), {}, "model.gguf"),
              HasSubstr("a model of the architecture 'llama'"));
}

TEST(QuantizedBaseOracle, Nf4ModelEqualsTheModelOfRoundedWeights) {
  TESSERA_CPU_ONLY("weights are packed on the CPU");
  const testing::TempFolder folder;
  const auto plain = testing::tiny_model(R"("attention_bias": true)");
  save_pretrained(*plain, folder / "model", {});
  const auto packed = packed_model(plain->config(), {.double_quant = true}, folder / "model");
  {
    const at::NoGradGuard no_grad;
    for (const auto& named : plain->named_parameters()) {
      auto& value = named.slot->parameter;
      if (!named.name.ends_with("_proj.weight")) continue;
      value.copy_(kernels::QuantizedWeight::nf4(value, {.double_quant = true}).values());
    }
  }
  const auto tokens = testing::tiny_tokens(2, 7);
  EXPECT_TRUE(packed->logits({.tokens = tokens}).allclose(plain->logits({.tokens = tokens}), 1e-4, 1e-5));
  // Weights that are drawn by init_weights() are packed, too.
  const auto drawn = make_model(plain->config(), {.device = at::kMeta});
  nn::quantize_linears(*drawn, {.double_quant = true});
  init_weights(*drawn, 5);
  EXPECT_TRUE(drawn->logits({.tokens = tokens}).allclose(plain->logits({.tokens = tokens}), 1e-4, 1e-5));
  for (const auto& named : packed->named_parameters()) {
    EXPECT_EQ(named.slot->parameter.requires_grad(), named.name.find(".lora_") != std::string::npos) << named.name;
    EXPECT_FALSE(named.name.ends_with("_proj.weight")) << named.name;
  }
}

}  // namespace
}  // namespace tessera
