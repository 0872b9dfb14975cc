#include "tessera/models/weights.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/formats/safetensors_folder.h"
#include "tessera/formats/safetensors_writer.h"
#include "tests/models/tiny.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using testing::tiny_config;
using testing::tiny_model;
using testing::tiny_tokens;

void expect_equal(nn::Module& a, nn::Module& b) {
  const auto left = a.named_parameters(), right = b.named_parameters();
  ASSERT_EQ(left.size(), right.size());
  for (size_t i = 0; i < left.size(); ++i) {
    EXPECT_EQ(left[i].name, right[i].name);
    EXPECT_TRUE(at::equal(left[i].slot->parameter, right[i].slot->parameter)) << left[i].name;
  }
}

TEST(Weights, SavedFolderLoadsBackEqual) {
  for (const char* changes : {"", R"("tie_word_embeddings": true)", R"("attention_bias": true, "mlp_bias": true)"}) {
    testing::TempFolder folder;
    publish_file(folder / "tokenizer.json", "{}");
    auto model = tiny_model(changes);
    save_pretrained(*model, folder / "out", folder.path());
    const auto again = from_pretrained(folder / "out");
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
  expect_equal(*model, *from_pretrained(folder / "out"));
}

TEST(Weights, DtypeIsConvertedOnSaveAndLoad) {
  testing::TempFolder folder;
  auto model = tiny_model();
  save_pretrained(*model, folder / "out", {}, {.dtype = at::kBFloat16});
  const auto stored = from_pretrained(folder / "out");
  EXPECT_EQ(stored->parameters().front().scalar_type(), at::kBFloat16);
  const auto wide = from_pretrained(folder / "out", at::kFloat);
  EXPECT_TRUE(at::equal(wide->parameters().front(), model->parameters().front().to(at::kBFloat16).to(at::kFloat)));
}

TEST(Weights, SaveRefusesAFolderThatHoldsSomethingAndLeavesItAlone) {
  testing::TempFolder folder;
  publish_file(folder / "mine", "x");
  EXPECT_THROW(save_pretrained(*tiny_model(), folder.path(), {}), Error);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

TEST(Weights, ModelWithoutValuesIsNotSaved) {
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

TEST(Weights, AllThatDoesNotFitIsReportedBeforeAnythingChanges) {
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
    for (const char* part : {"model.embed_tokens.weight: saved [37, 15], model wants [37, 16]", "q_proj.weight is missing",
                             "and 17 more", "tessera ckpt ls"}) {
      EXPECT_NE(message.find(part), std::string::npos) << message;
    }
    EXPECT_EQ(message.find("inv_freq"), std::string::npos) << message;
  }
  expect_equal(*model, *same);
}

TEST(Weights, WrongShapeAloneIsAShapeError) {
  testing::TempFolder folder;
  save_pretrained(*tiny_model(), folder / "out", {});
  auto model = make_model(ModelConfig::parse(tiny_config(R"("vocab_size": 38)"), "t"), {.device = at::kMeta});
  try {
    load_pretrained(*model, folder / "out");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kShape);
    EXPECT_NE(std::string(error.what()).find("model.embed_tokens.weight: saved [37, 16], model wants [38, 16]"), std::string::npos)
        << error.what();
  }
  for (const auto& parameter : model->parameters()) EXPECT_TRUE(parameter.is_meta());
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

}  // namespace
}  // namespace tessera
