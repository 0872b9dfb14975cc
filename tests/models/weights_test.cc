// Tests of loading and saving model weights: shards, dtypes, foreign tensors, tied weights, initial values and errors.
#include "tessera/models/files/weights.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/formats/safetensors/safetensors_folder.h"
#include "tessera/formats/safetensors/safetensors_writer.h"
#include "tests/models/tiny.h"
#include "tests/support/alone_on_device.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using testing::tiny_config;
using testing::tiny_model;
using testing::tiny_tokens;

std::shared_ptr<CausalLM> read_back(const std::filesystem::path& dir,
                                    std::optional<c10::ScalarType> dtype = std::nullopt) {
  return from_pretrained(dir, dtype, testing::test_device());
}

void expect_equal(nn::Module& a, nn::Module& b) {
  const auto left = a.named_parameters(), right = b.named_parameters();
  ASSERT_EQ(left.size(), right.size());
  for (size_t i = 0; i < left.size(); ++i) {
    EXPECT_EQ(left[i].name, right[i].name);
    EXPECT_TRUE(at::equal(left[i].slot->parameter.cpu(), right[i].slot->parameter.cpu())) << left[i].name;
  }
}

TEST(Weights, SavedFolderLoadsBackEqual) {
  for (const char* changes : {"", R"("tie_word_embeddings": true)", R"("attention_bias": true, "mlp_bias": true)"}) {
    testing::TempFolder folder;
    publish_file(folder / "tokenizer.json", "{}");
    auto model = tiny_model(changes);
    save_pretrained(*model, folder / "out", folder.path());
    const auto again = read_back(folder / "out");
    expect_equal(*model, *again);
    EXPECT_EQ(read_file(folder / "out" / "tokenizer.json"), "{}");
    EXPECT_FALSE(std::filesystem::exists(folder / "out" / "generation_config.json"));
    EXPECT_TRUE(nlohmann::json::parse(read_file(folder / "out" / "config.json")).contains("house_key"));
  }
}

TEST(Weights, LargeModelsAreSavedInShards) {
  testing::TempFolder folder;
  auto model = tiny_model();
  save_pretrained(*model, folder / "out", {}, {.max_shard_bytes = 4000});
  EXPECT_TRUE(std::filesystem::exists(folder / "out" / "model.safetensors.index.json"));
  expect_equal(*model, *read_back(folder / "out"));
}

TEST(Weights, DtypeIsConvertedOnSaveAndLoad) {
  testing::TempFolder folder;
  auto model = tiny_model();
  save_pretrained(*model, folder / "out", {}, {.dtype = at::kBFloat16});
  const auto stored = read_back(folder / "out");
  EXPECT_EQ(stored->parameters().front().scalar_type(), at::kBFloat16);
  const auto wide = read_back(folder / "out", at::kFloat);
  EXPECT_TRUE(at::equal(wide->parameters().front(), model->parameters().front().to(at::kBFloat16).to(at::kFloat)));
}

TEST(Weights, SaveRefusesANonEmptyFolder) {
  testing::TempFolder folder;
  publish_file(folder / "mine", "x");
  EXPECT_THROW(save_pretrained(*tiny_model(), folder.path(), {}), Error);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

TEST(Weights, MetaModelIsNotSaved) {
  testing::TempFolder folder;
  auto model = make_model(ModelConfig::parse(tiny_config(), "t"), {.device = at::kMeta});
  EXPECT_THROW(save_pretrained(*model, folder / "out", {}), Error);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(Weights, TruncatedFileIsAnErrorThatChangesNothing) {
  testing::TempFolder folder;
  save_pretrained(*tiny_model(), folder / "out", {});
  const auto file = folder / "out" / "model.safetensors";
  std::filesystem::resize_file(file, std::filesystem::file_size(file) - 5);
  auto model = tiny_model("", 99), same = tiny_model("", 99);
  try {
    load_pretrained(*model, folder / "out");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kFormat) << error.what();
  }
  expect_equal(*model, *same);
}

TEST(Weights, AllMismatchesAreReportedBeforeAnyParameterChanges) {
  testing::TempFolder folder;
  std::filesystem::create_directory(folder / "out");
  SafetensorsFolderWriter writer(folder / "out", {{"model.norm.weight", at::kFloat, {16}},
                                                  {"model.embed_tokens.weight", at::kFloat, {37, 15}},
                                                  {"lm_head.weight", at::kInt, {37, 16}},
                                                  {"surprise", at::kFloat, {1}},
                                                  {"model.layers.0.self_attn.rotary_emb.inv_freq", at::kFloat, {2}}});
  writer.write("model.norm.weight", at::full({16}, 3.0F));
  writer.write("model.embed_tokens.weight", at::zeros({37, 15}));
  writer.write("lm_head.weight", at::zeros({37, 16}, at::kInt));
  writer.write("surprise", at::zeros({1}));
  writer.write("model.layers.0.self_attn.rotary_emb.inv_freq", at::zeros({2}));
  writer.finish();
  auto model = tiny_model(), same = tiny_model();
  try {
    load_pretrained(*model, folder / "out");
    FAIL();
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(error.kind(), ErrorKind::kFormat);
    for (const char* part : {"model.embed_tokens.weight: saved [37, 15], model wants [37, 16]",
                             "q_proj.weight is missing", "and 17 more", "tessera ckpt ls"}) {
      EXPECT_NE(message.find(part), std::string::npos) << message;
    }
    EXPECT_EQ(message.find("inv_freq"), std::string::npos) << message;
  }
  expect_equal(*model, *same);
}

TEST(Weights, WrongShapeWithoutOtherErrorsIsAShapeError) {
  testing::TempFolder folder;
  save_pretrained(*tiny_model(), folder / "out", {});
  auto model = make_model(ModelConfig::parse(tiny_config(R"("vocab_size": 38)"), "t"), {.device = at::kMeta});
  try {
    load_pretrained(*model, folder / "out");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kShape);
    EXPECT_NE(std::string(error.what()).find("model.embed_tokens.weight: saved [37, 16], model wants [38, 16]"),
              std::string::npos)
        << error.what();
  }
  for (const auto& parameter : model->parameters()) EXPECT_TRUE(parameter.is_meta());
}

// The folder holds a model with images: the text model under the names that such files use, and tensors of other
// modules.
TEST(Weights, TensorsOfOtherModulesAreSavedByteForByte) {
  testing::TempFolder folder;
  auto model = make_model(ModelConfig::parse(testing::tiny_config_with_images(), "t"), {.device = at::kMeta});
  init_weights(*model, 5, testing::test_device());
  save_pretrained(*model, folder / "text", {});
  const auto text = SafetensorsFolder::open(folder / "text");
  EXPECT_TRUE(text.contains("language_model.model.layers.0.mlp.up_proj.weight"));
  const std::map<std::string, at::Tensor> foreign = {
      {"vision_tower.bytes", at::arange(7, at::kByte)},
      {"vision_tower.weight", at::randn({3, 5}).to(at::kHalf)},
      {"multi_modal_projector.mm_input_projection_weight", at::full({2, 2}, std::nan(""), at::kFloat)}};
  std::filesystem::create_directory(folder / "all");
  std::vector<SafetensorsSpec> specs;
  for (const auto& [name, file] : text.files()) specs.push_back({name, at::kFloat, text.entry(name).shape});
  for (const auto& [name, value] : foreign) specs.push_back({name, value.scalar_type(), value.sizes().vec()});
  SafetensorsFolderWriter writer(folder / "all", specs);
  for (const auto& [name, file] : text.files()) writer.write(name, text.tensor(name));
  for (const auto& [name, value] : foreign) writer.write(name, value);
  writer.finish();

  auto loaded = make_model(model->config(), {.device = at::kMeta});
  load_pretrained(*loaded, folder / "all");
  expect_equal(*model, *loaded);
  save_pretrained(*loaded, folder / "out", folder / "all", {.dtype = at::kBFloat16, .max_shard_bytes = 2000});
  const auto out = SafetensorsFolder::open(folder / "out");
  EXPECT_EQ(out.files().size(), specs.size());
  EXPECT_EQ(out.entry("language_model.model.norm.weight").dtype, at::kBFloat16);
  for (const auto& [name, value] : foreign) {
    const auto found = out.tensor(name).contiguous();
    ASSERT_EQ(found.scalar_type(), value.scalar_type()) << name;
    ASSERT_EQ(found.sizes(), value.sizes()) << name;
    EXPECT_EQ(std::memcmp(found.const_data_ptr(), value.const_data_ptr(), value.nbytes()), 0) << name;
  }
  // For every other family these tensors are unexpected.
  EXPECT_THROW(load_pretrained(*tiny_model(testing::tiny_gemma3_changes()), folder / "all"), Error);
}

// The tensors have the names of transformers' own parameters. Newer files may have these names.
TEST(Weights, MultimodalModelLoadsAndKeepsParameterNamesOfTransformers) {
  testing::TempFolder folder;
  auto model = make_model(ModelConfig::parse(testing::tiny_config_with_images(), "t"), {.device = at::kMeta});
  init_weights(*model, 5, testing::test_device());
  std::filesystem::create_directory(folder / "own");
  std::vector<SafetensorsSpec> specs;
  for (const auto& named : model->named_parameters()) {
    specs.push_back({named.name, at::kFloat, named.slot->parameter.sizes().vec()});
  }
  SafetensorsFolderWriter writer(folder / "own", specs);
  for (const auto& named : model->named_parameters()) writer.write(named.name, named.slot->parameter.detach());
  writer.finish();
  auto loaded = make_model(model->config(), {.device = at::kMeta});
  load_pretrained(*loaded, folder / "own");
  expect_equal(*model, *loaded);
  save_pretrained(*loaded, folder / "out", folder / "own");
  EXPECT_TRUE(SafetensorsFolder::open(folder / "out").contains("model.language_model.norm.weight"));
}

TEST(InitWeights, ValuesFollowTheConfigAndTheSeed) {
  auto model = tiny_model("", 5), same = tiny_model("", 5), other = tiny_model("", 6);
  expect_equal(*model, *same);
  EXPECT_FALSE(at::equal(model->parameters().front(), other->parameters().front()));
  auto wide = make_model(ModelConfig::parse(tiny_config(R"("vocab_size": 20000, "attention_bias": true)"), "t"), {});
  init_weights(*wide, 3);
  const auto embedding = wide->parameters().front();
  EXPECT_NEAR(embedding.mean().item<double>(), 0.0, 0.005);
  EXPECT_NEAR(embedding.std().item<double>(), 0.3, 0.005);
  EXPECT_NEAR(embedding.abs().max().item<double>(), 0.3 * 4.6, 0.3);
  for (const auto& named : wide->named_parameters()) {
    const auto& value = named.slot->parameter;
    if (value.dim() != 1) continue;
    EXPECT_TRUE(at::equal(value, at::full_like(value, named.name.ends_with("bias") ? 0.0 : 1.0))) << named.name;
  }
}

constexpr const char* kExperts =
    R"("architectures": ["Qwen3MoeForCausalLM"], "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 6)";

TEST(StackedExperts, AreSavedSeparatelyAndLoadedFromEitherForm) {
  testing::TempFolder folder;
  auto model = tiny_model(kExperts);
  save_pretrained(*model, folder / "out", {});
  const auto saved = SafetensorsFolder::open(folder / "out");
  const auto& stacked = dynamic_cast<CausalLM&>(*model).named_parameters();
  at::Tensor gate_up, down;
  for (const auto& named : stacked) {
    if (named.name == "model.layers.1.mlp.experts.gate_up_proj") gate_up = named.slot->parameter;
    if (named.name == "model.layers.1.mlp.experts.down_proj") down = named.slot->parameter;
  }
  for (int64_t expert = 0; expert < 5; ++expert) {
    const auto prefix = "model.layers.1.mlp.experts." + std::to_string(expert) + ".";
    EXPECT_TRUE(at::equal(testing::here(saved.tensor(prefix + "gate_proj.weight")), gate_up[expert].narrow(0, 0, 6)));
    EXPECT_TRUE(at::equal(testing::here(saved.tensor(prefix + "up_proj.weight")), gate_up[expert].narrow(0, 6, 6)));
    EXPECT_TRUE(at::equal(testing::here(saved.tensor(prefix + "down_proj.weight")), down[expert]));
  }
  EXPECT_FALSE(saved.contains("model.layers.1.mlp.experts.gate_up_proj"));
  expect_equal(*model, *read_back(folder / "out"));

  std::filesystem::create_directory(folder / "whole");
  std::vector<SafetensorsSpec> specs;
  for (const auto& named : stacked) specs.push_back({named.name, at::kFloat, named.slot->parameter.sizes().vec()});
  {
    SafetensorsFolderWriter writer(folder / "whole", specs, {});
    for (const auto& named : stacked) writer.write(named.name, named.slot->parameter.detach());
    writer.finish();
  }
  publish_file(folder / "whole" / "config.json", read_file(folder / "out" / "config.json"));
  expect_equal(*model, *read_back(folder / "whole"));
}

TEST(StackedExperts, MissingAndMisshapenExpertsAreReported) {
  testing::TempFolder folder;
  save_pretrained(*tiny_model(kExperts), folder / "out", {});
  const auto refusal = [&](const std::string& changes) -> std::string {
    auto other = make_model(ModelConfig::parse(tiny_config(changes), "t"), {.device = at::kMeta});
    try {
      load_pretrained(*other, folder / "out");
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const std::string base = R"("architectures": ["Qwen3MoeForCausalLM"], "num_experts_per_tok": 2, )";
  EXPECT_NE(
      refusal(base + R"("num_experts": 6, "moe_intermediate_size": 6)").find("experts.5.gate_proj.weight is missing"),
      std::string::npos);
  EXPECT_NE(refusal(base + R"("num_experts": 4, "moe_intermediate_size": 6)")
                .find("experts.4.down_proj.weight is unexpected"),
            std::string::npos);
  EXPECT_NE(refusal(base + R"("num_experts": 5, "moe_intermediate_size": 8)")
                .find("experts.0.gate_proj.weight: saved [6, 16], model wants [8, 16]"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera
