// Tests of model folders with the faults that users have: two weight files, a head beside tied embeddings, an adapter,
// and leftover files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/warning_log.h"
#include "tessera/formats/safetensors/safetensors_folder.h"
#include "tessera/formats/safetensors/safetensors_writer.h"
#include "tessera/models/adapters/adapters.h"
#include "tessera/text/tokenizer.h"
#include "tests/models/stored_tensors.h"
#include "tests/models/tiny.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::tiny_model;

std::string error_of(const std::function<void()>& act, ErrorKind kind) {
  try {
    act();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

// Writes the tensors of the folder again, after `change`.
void rewrite(const fs::path& folder, const std::function<void(std::map<std::string, at::Tensor>&)>& change) {
  auto tensors = testing::stored_tensors(folder);
  change(tensors);
  testing::store_tensors(folder, tensors);
}

at::Tensor logits_of(CausalLM& model) {
  const at::NoGradGuard no_grad;
  return model.logits({.tokens = testing::tiny_tokens(1, 9)});
}

TEST(ModelFolder, ATiedHeadThatDiffersFromTheEmbeddingsIsRefused) {
  const testing::TempFolder folder;
  const auto model = tiny_model(R"("tie_word_embeddings": true)");
  save_pretrained(*model, folder / "m", {});
  rewrite(folder / "m", [](auto& tensors) { tensors["lm_head.weight"] = -tensors["model.embed_tokens.weight"]; });
  const auto load = [&] { from_pretrained(folder / "m"); };
  const auto names =
      AllOf(HasSubstr("lm_head.weight"), HasSubstr("model.embed_tokens.weight"), HasSubstr("tie_word_embeddings"));
  EXPECT_THAT(error_of(load, ErrorKind::kFormat), names);
  const auto checked = make_model(ModelConfig::from_folder(folder / "m"), {.device = at::kMeta});
  EXPECT_THAT(error_of([&] { check_pretrained(*checked, folder / "m"); }, ErrorKind::kFormat), names);
  // A difference in one value of the last row is an error, too.
  rewrite(folder / "m", [](auto& tensors) {
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone();
    tensors["lm_head.weight"][36][15] += 1;
  });
  EXPECT_THAT(error_of(load, ErrorKind::kFormat), names);
}

TEST(ModelFolder, ATiedHeadThatEqualsTheEmbeddingsLoads) {
  const testing::TempFolder folder;
  const auto model = tiny_model(R"("tie_word_embeddings": true)");
  save_pretrained(*model, folder / "m", {});
  rewrite(folder / "m",
          [](auto& tensors) { tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone(); });
  EXPECT_TRUE(at::equal(logits_of(*from_pretrained(folder / "m")), logits_of(*model)));
}

TEST(ModelFolder, ASingleFileNextToShardsIsReadWithAWarningThatNamesBoth) {
  const testing::TempFolder folder;
  const auto single = tiny_model(""), sharded = tiny_model("", 6);
  save_pretrained(*sharded, folder / "m", {}, {.max_shard_bytes = 4000});
  save_pretrained(*single, folder / "n", {});
  fs::copy(folder / "n" / "model.safetensors", folder / "m" / "model.safetensors");
  WarningLog warnings;
  EXPECT_TRUE(at::equal(logits_of(*from_pretrained(folder / "m")), logits_of(*single))) << "as in transformers";
  EXPECT_THAT(warnings.take_warnings(),
              ElementsAre(AllOf(HasSubstr("model.safetensors: is read"), HasSubstr("model.safetensors.index.json"))));
  from_pretrained(folder / "m");
  EXPECT_THAT(warnings.take_warnings(), IsEmpty()) << "told once";
}

TEST(ModelFolder, AnIndexOfTheSingleFileItselfGivesNoWarning) {
  const testing::TempFolder folder;
  save_pretrained(*tiny_model(), folder / "m", {});
  publish_file(folder / "m" / "model.safetensors.index.json",
               R"({"weight_map": {"model.norm.weight": "model.safetensors"}})");
  WarningLog warnings;
  from_pretrained(folder / "m");
  EXPECT_THAT(warnings.take_warnings(), IsEmpty());
}

TEST(ModelFolder, AnAdapterInAModelFolderIsRefusedUntilItIsMerged) {
  const testing::TempFolder folder;
  const auto model = tiny_model();
  save_pretrained(*model, folder / "m", {});
  const auto before = logits_of(*model);
  add_adapters(*model, {.rank = 2, .target_modules = {"q_proj"}});
  init_adapters(*model, 3);
  {
    const at::NoGradGuard no_grad;
    for (const auto& [name, linear] : adapted_linears(*model)) linear->lora_B->weight.fill_(0.5);
  }
  const auto adapted = logits_of(*model);
  save_adapters(*model, folder / "a");
  for (const auto& file : fs::directory_iterator(folder / "a")) fs::copy(file, folder / "m" / file.path().filename());
  EXPECT_THAT(error_of([&] { from_pretrained(folder / "m"); }, ErrorKind::kConfig),
              AllOf(HasSubstr("adapter_config.json"), HasSubstr("--adapter")));
  const auto checked = make_model(ModelConfig::from_folder(folder / "m"), {.device = at::kMeta});
  error_of([&] { check_pretrained(*checked, folder / "m"); }, ErrorKind::kConfig);
  // 'ckpt convert --adapter' does the same if one folder is both the model and the adapter.
  const auto base = from_pretrained(folder / "m", std::nullopt, at::kCPU, FolderAdapter::kIgnore);
  add_adapters(*base, read_adapter_config(folder / "m"));
  load_adapters(*base, folder / "m");
  save_pretrained(*base, folder / "merged", folder / "m", {.merge_adapters = true});
  const auto merged = logits_of(*from_pretrained(folder / "merged"));
  EXPECT_LT((merged - adapted).abs().max().item<double>(), 1e-4);
  EXPECT_GT((merged - before).abs().max().item<double>(), 1e-2);
}

// transformers saves its base models (such as LlamaModel) without base_model_prefix.
TEST(ModelFolder, TensorNamesWithoutTheBaseModelPrefixLoad) {
  const std::string experts =
      R"("architectures": ["Qwen3MoeForCausalLM"], "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 6)";
  for (const auto& changes : {std::string(R"("tie_word_embeddings": true)"), std::string(), experts}) {
    SCOPED_TRACE(changes);
    const testing::TempFolder folder;
    const auto model = tiny_model(changes);
    save_pretrained(*model, folder / "m", {});
    rewrite(folder / "m", [](auto& tensors) {
      std::map<std::string, at::Tensor> base;
      for (const auto& [name, tensor] : tensors) base[name.starts_with("model.") ? name.substr(6) : name] = tensor;
      tensors = base;
    });
    WarningLog warnings;
    const auto loaded = from_pretrained(folder / "m");
    EXPECT_THAT(warnings.take_warnings(), IsEmpty());
    EXPECT_TRUE(at::equal(logits_of(*loaded), logits_of(*model)));
    save_pretrained(*loaded, folder / "out", folder / "m");
    EXPECT_TRUE(SafetensorsFolder::open(folder / "out").contains("model.norm.weight"));
    rewrite(folder / "m", [](auto& tensors) { tensors["model.norm.weight"] = tensors["norm.weight"] + 1; });
    EXPECT_THAT(
        error_of([&] { from_pretrained(folder / "m"); }, ErrorKind::kFormat),
        HasSubstr("model.norm.weight and norm.weight are one parameter under two names, but their values differ"));
    rewrite(folder / "m", [](auto& tensors) {
      tensors.erase("model.norm.weight");
      tensors.erase("norm.weight");
    });
    EXPECT_THAT(error_of([&] { from_pretrained(folder / "m"); }, ErrorKind::kFormat),
                HasSubstr("model.norm.weight is missing"));
  }
}

TEST(ModelFolder, UnexpectedTensorsAreNamedInOneWarning) {
  const testing::TempFolder folder;
  const auto model = tiny_model();
  save_pretrained(*model, folder / "m", {});
  rewrite(folder / "m", [](auto& tensors) {
    tensors["v_head.summary.weight"] = at::ones({1, 16});
    tensors["model.layers.0.self_attn.q_proj.bias"] = at::ones({16});
    tensors["model.layers.2.input_layernorm.weight"] = at::ones({16});
    for (int i = 0; i < 3; ++i) tensors["zeta" + std::to_string(i)] = at::ones({1}, at::kInt);
  });
  WarningLog warnings;
  EXPECT_TRUE(at::equal(logits_of(*from_pretrained(folder / "m")), logits_of(*model)));
  EXPECT_THAT(warnings.take_warnings(),
              ElementsAre(AllOf(HasSubstr("6 tensors"), HasSubstr("model.layers.0.self_attn.q_proj.bias"),
                                HasSubstr("v_head.summary.weight"), HasSubstr("and 2 more"))));
  rewrite(folder / "m", [](auto& tensors) { tensors.erase("model.norm.weight"); });
  EXPECT_THAT(error_of([&] { from_pretrained(folder / "m"); }, ErrorKind::kFormat),
              HasSubstr("model.norm.weight is missing"));
}

TEST(ModelFolder, TheErrorOfAMissingTokenizerJsonNamesOtherTokenizerFiles) {
  for (const char* name : {"tekken.json", "tokenizer.model", "tiktoken.model", "vocab.json"}) {
    const testing::TempFolder folder;
    publish_file(folder / name, "x");
    EXPECT_THAT(error_of([&] { text::Tokenizer::from_folder(folder.path()); }, ErrorKind::kIo),
                AllOf(HasSubstr(name), HasSubstr("tokenizer.json"), HasSubstr("save_pretrained")));
  }
  const testing::TempFolder empty;
  EXPECT_THAT(error_of([&] { text::Tokenizer::from_folder(empty.path()); }, ErrorKind::kIo),
              HasSubstr("holds no tokenizer.json"));
}

TEST(ModelFolder, QuantisedWeightsAreRefusedWithTheirMethod) {
  const auto refusal = [](const std::string& settings) {
    const auto text = testing::tiny_config(R"("quantization_config": )" + settings);
    return error_of([&] { ModelConfig::parse(text, "t"); }, ErrorKind::kConfig);
  };
  EXPECT_THAT(refusal(R"({"quant_method": "fp8", "activation_scheme": "dynamic"})"), HasSubstr("'fp8'"));
  EXPECT_THAT(refusal(R"({"load_in_4bit": true})"), HasSubstr("load_in_4bit true"));
  EXPECT_THAT(refusal(R"({"bits": 4})"), HasSubstr("bits 4"));
  EXPECT_THAT(refusal(R"("awq")"), HasSubstr("awq"));
}

}  // namespace
}  // namespace tessera
