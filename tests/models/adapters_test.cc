// Tests of LoRA adapters: initial values, targets, saved files, merging, dropout and the errors for bad configurations.
#include "tessera/models/adapters/adapters.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/formats/safetensors/safetensors.h"
#include "tests/models/tiny.h"
#include "tests/support/alone_on_device.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string adapter_error(const std::function<void()>& call, ErrorKind kind) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  return "no error";
}

std::shared_ptr<CausalLM> adapted(const AdapterConfig& config, uint64_t seed = 7) {
  auto model = testing::tiny_model();
  add_adapters(*model, config);
  init_adapters(*model, seed);
  return model;
}

void set_b(CausalLM& model, double value) {
  const at::NoGradGuard no_grad;
  for (const auto& [path, linear] : adapted_linears(model)) linear->lora_B->weight.fill_(value);
}

TEST(Adapters, StartAsTheBaseModelAndAreTheOnlyTrainableParameters) {
  const auto tokens = testing::tiny_tokens(2, 7);
  const auto wanted = testing::tiny_model()->logits({.tokens = tokens});
  for (const bool dora : {false, true}) {
    const auto model = adapted({.rank = 2, .dora = dora, .target_modules = {"q_proj", "mlp.down_proj"}});
    EXPECT_TRUE(model->logits({.tokens = tokens}).allclose(wanted, 1e-5, 1e-6));
    int64_t trained = 0;
    for (const auto& named : model->named_parameters()) {
      EXPECT_EQ(named.slot->parameter.requires_grad(), named.name.find(".lora_") != std::string::npos) << named.name;
      trained += named.slot->parameter.requires_grad();
    }
    EXPECT_EQ(trained, 2 * 2 * (dora ? 3 : 2));
  }
}

TEST(Adapters, AreInitialisedUniformlyAsInPeft) {
  const auto model = adapted({.rank = 16});
  const auto& a = adapted_linears(*model).front().second->lora_A->weight;
  const double bound = 1 / std::sqrt(16.0);  // 16 is the width of the inputs
  EXPECT_LE(a.abs().max().item<double>(), bound);
  EXPECT_GT(a.abs().max().item<double>(), 0.9 * bound);
  EXPECT_NEAR(a.mean().item<double>(), 0, 0.1 * bound);
  EXPECT_TRUE(a.equal(adapted_linears(*adapted({.rank = 16})).front().second->lora_A->weight));
  EXPECT_FALSE(a.equal(adapted_linears(*adapted({.rank = 16}, 8)).front().second->lora_A->weight));
}

TEST(Adapters, TargetsAreNamesOrPatterns) {
  const auto paths = [](std::vector<std::string> targets) {
    auto model = testing::tiny_model();
    return add_adapters(*model, {.target_modules = std::move(targets)});
  };
  EXPECT_EQ(paths({"all-linear"}).size(), 14u);
  EXPECT_THAT(paths({"v_proj"}), ElementsAre("model.layers.0.self_attn.v_proj", "model.layers.1.self_attn.v_proj"));
  EXPECT_THAT(paths({"1.self_attn.v_proj"}), ElementsAre("model.layers.1.self_attn.v_proj"));
  EXPECT_THAT(paths({"model\\.layers\\.0\\.mlp\\.(up|down)_proj"}),
              ElementsAre("model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"));
  EXPECT_THAT(adapter_error(
                  [&] {
                    paths({"q_proj", "qkv"});
                  },
                  ErrorKind::kConfig),
              HasSubstr("'qkv' is not a Linear of this model. Its Linears are called down_proj"));
  EXPECT_THAT(adapter_error([&] { paths({"(q_proj"}); }, ErrorKind::kConfig),
              HasSubstr("is no name and no regular expression of this version"));
  EXPECT_THAT(adapter_error([&] { paths({}); }, ErrorKind::kConfig), HasSubstr("the list is empty"));
  auto model = testing::tiny_model();
  add_adapters(*model, {});
  EXPECT_THAT(adapter_error([&] { add_adapters(*model, {}); }, ErrorKind::kConfig), HasSubstr("has adapters already"));
  for (const char* name : {"lm_head", "model.embed_tokens"}) {
    EXPECT_THAT(adapter_error(
                    [&] {
                      paths({"q_proj", name});
                    },
                    ErrorKind::kConfig),
                HasSubstr("this version has no adapters on embedding and head. Leave it out"));
  }
}

TEST(Adapters, SavedAdaptersLoadEqual) {
  const testing::TempFolder folder;
  const auto tokens = testing::tiny_tokens(1, 8);
  const AdapterConfig config{.rank = 3, .alpha = 5, .dora = true, .target_modules = {"o_proj", "up_proj"}};
  const auto model = adapted(config);
  set_b(*model, 0.05);
  save_adapters(*model, folder / "a", {.base = "some/model", .revision = "v2"});
  EXPECT_THAT(read_file(folder / "a/adapter_config.json"),
              AllOf(HasSubstr(R"("base_model_name_or_path": "some/model")"), HasSubstr(R"("revision": "v2")")));
  const auto read = read_adapter_config(folder / "a");
  EXPECT_EQ(read.rank, 3);
  EXPECT_EQ(read.alpha, 5);
  EXPECT_TRUE(read.dora);
  EXPECT_THAT(read.target_modules, ElementsAre("o_proj", "up_proj"));
  auto again = testing::tiny_model();
  add_adapters(*again, read);
  load_adapters(*again, folder / "a");
  EXPECT_TRUE(again->logits({.tokens = tokens}).equal(model->logits({.tokens = tokens})));

  auto other = testing::tiny_model();
  add_adapters(*other, {.rank = 4, .dora = true, .target_modules = {"o_proj", "up_proj"}});
  EXPECT_THAT(adapter_error([&] { load_adapters(*other, folder / "a"); }, ErrorKind::kShape),
              HasSubstr("o_proj.lora_A.weight: saved [3, 16], model wants [4, 16] (and 7 more)"));
  auto fewer = testing::tiny_model();
  add_adapters(*fewer, {.rank = 3, .dora = true, .target_modules = {"o_proj"}});
  EXPECT_THAT(adapter_error([&] { load_adapters(*fewer, folder / "a"); }, ErrorKind::kFormat),
              HasSubstr("is unexpected"));
  EXPECT_THAT(adapter_error([&] { save_adapters(*model, folder / "a"); }, ErrorKind::kIo), HasSubstr("a"));
}

TEST(Adapters, TargetsInSomeLayersAreSavedAsPaths) {
  const testing::TempFolder folder;
  save_adapters(*adapted({.target_modules = {"1.self_attn.v_proj"}}), folder / "a");
  EXPECT_THAT(read_adapter_config(folder / "a").target_modules, ElementsAre("model.layers.1.self_attn.v_proj"));
}

TEST(Adapters, DescriptionNamesModulesAndLayers) {
  const auto described = [](std::vector<std::string> targets, const std::string& changes = "") {
    auto model = testing::tiny_model(changes);
    add_adapters(*model, {.target_modules = std::move(targets)});
    return describe_adapters(*model);
  };
  EXPECT_EQ(described({"q_proj", "down_proj"}), "q_proj, down_proj of 2 layers");
  EXPECT_EQ(described({"1.self_attn.v_proj"}), "v_proj of 1 of 2 layers");
  EXPECT_EQ(described({"q_proj", "0.mlp.up_proj"}), "q_proj, up_proj of 2 layers, not all of them in each");
  EXPECT_EQ(described({"all-linear"}), "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj of 2 layers");
  EXPECT_EQ(described({"all-linear"}, R"("architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
      "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 4)"),
            "q_proj, k_proj, v_proj, o_proj of 2 layers; experts and router stay frozen");
}

TEST(Adapters, FolderWithoutWeightsIsAnError) {
  const testing::TempFolder folder;
  EXPECT_THAT(adapter_error([&] { adapter_weights_file(folder / ""); }, ErrorKind::kIo),
              HasSubstr("found neither adapter_model.safetensors nor adapter_model.bin"));
}

// As in PEFT, a target_modules that is a string is a regular expression of whole paths. A list holds names, and some
// names may belong to other models.
TEST(Adapters, TargetsOfAdapterConfigAreReadAsInPeft) {
  const testing::TempFolder folder;
  const auto paths = [&](const std::string& targets) {
    publish_file(folder / "adapter_config.json", R"({"peft_type": "LORA", "r": 4, "target_modules": )" + targets + "}");
    auto model = testing::tiny_model();
    return add_adapters(*model, read_adapter_config(folder / ""));
  };
  const auto error_of = [&](const std::string& targets) {
    return adapter_error([&] { paths(targets); }, ErrorKind::kConfig);
  };
  EXPECT_EQ(paths(R"("All-Linear")").size(), 14u);
  EXPECT_EQ(paths(R"(".*q_proj")").size(), 2u);
  EXPECT_EQ(paths(R"(["q_proj", "query_key_value"])").size(), 2u);
  EXPECT_THAT(
      error_of(R"("q_proj")"),
      HasSubstr("'q_proj' is read as a regular expression, because it is a text and not a list, and matches the "
                "whole path of no Linear of this model"));
  EXPECT_THAT(error_of(R"([".*q_proj"])"), HasSubstr("'.*q_proj' is not a Linear of this model"));
  EXPECT_THAT(error_of(R"(["q_proj", "lm_head"])"), HasSubstr("'lm_head': this version has no adapters on"));
  EXPECT_THAT(error_of(R"(["all-linear"])"), HasSubstr("'all-linear' is not a Linear of this model"));
  EXPECT_THAT(error_of(R"("(?i).*Q_PROJ")"), HasSubstr("'(?i).*Q_PROJ' is no regular expression of this version"));
}

// A hostile adapter_config.json may hold a pattern that takes exponential time in a backtracking matcher.
TEST(Adapters, TargetPatternsTakeBoundedTime) {
  auto model = testing::tiny_model();
  EXPECT_THAT(adapter_error([&] { add_adapters(*model, {.target_modules = {"(.+)+!"}}); }, ErrorKind::kConfig),
              HasSubstr("(.+)+!"));
  EXPECT_THAT(
      adapter_error([&] { add_adapters(*model, {.target_modules = {std::string(20000, '(')}}); }, ErrorKind::kConfig),
      HasSubstr("20000 characters, wanted 1000 at most"));
}

TEST(Adapters, UnsupportedConfigurationsAreRefused) {
  const testing::TempFolder folder;
  const auto error_of = [&](const std::string& members, ErrorKind kind = ErrorKind::kConfig) {
    publish_file(folder / "adapter_config.json", "{" + members + "}");
    return adapter_error([&] { read_adapter_config(folder / ""); }, kind);
  };
  const std::string fine = R"("peft_type": "LORA", "r": 4, "target_modules": ["q_proj"])";
  EXPECT_EQ(error_of(fine + R"(, "bias": "none", "rank_pattern": {}, "modules_to_save": null)"), "no error");
  EXPECT_THAT(error_of(R"("peft_type": "IA3")"), HasSubstr("peft_type: found 'IA3', wanted LORA"));
  EXPECT_THAT(error_of(fine + R"(, "bias": "all")"), HasSubstr("does not train biases"));
  EXPECT_THAT(error_of(fine + R"(, "rank_pattern": {"q_proj": 2})"), HasSubstr("rank_pattern: found"));
  EXPECT_THAT(error_of(fine + R"(, "modules_to_save": ["lm_head"])"), HasSubstr("modules_to_save: found"));
  EXPECT_THAT(error_of(fine + R"(, "init_lora_weights": "pissa")"), HasSubstr("others change the base"));
  for (const char* more :
       {R"("alpha_pattern": {"q_proj": 2})", R"("layers_to_transform": [1])", R"("exclude_modules": ["v_proj"])",
        R"("target_parameters": ["mlp.experts.gate_up_proj"])"}) {
    const auto text = error_of(fine + ", " + more);
    EXPECT_THAT(text, AllOf(HasSubstr("found"), HasSubstr("Merge the adapter with PEFT (merge_and_unload)"))) << more;
  }
  EXPECT_THAT(error_of(R"("peft_type": "LORA", "r": 0, "target_modules": [])", ErrorKind::kFormat),
              HasSubstr(": r: found 0"));
  EXPECT_THAT(error_of(R"("peft_type": "LORA", "r": 2)", ErrorKind::kFormat), HasSubstr("target_modules is missing"));
}

TEST(Adapters, MergedModelEqualsTheAdaptedModel) {
  const testing::TempFolder folder;
  const auto tokens = testing::tiny_tokens(2, 6);
  for (const bool dora : {false, true}) {
    const auto model = adapted({.rank = 2, .dora = dora});
    set_b(*model, 0.1);
    const auto dir = folder / (dora ? "dora" : "lora");
    save_pretrained(*model, dir, {}, {.merge_adapters = true});
    const auto merged = from_pretrained(dir, std::nullopt, testing::test_device());
    EXPECT_TRUE(merged->logits({.tokens = tokens}).allclose(model->logits({.tokens = tokens}), 1e-4, 1e-5));
    save_pretrained(*model, folder / (dora ? "dora-base" : "lora-base"), {});
    const auto base =
        from_pretrained(folder / (dora ? "dora-base" : "lora-base"), std::nullopt, testing::test_device());
    EXPECT_TRUE(base->logits({.tokens = tokens}).equal(testing::tiny_model()->logits({.tokens = tokens})));
  }
}

TEST(Adapters, DropoutDependsOnTheRowsIndexInTheRun) {
  const auto tokens = testing::tiny_tokens(4, 8);
  const auto loss = [&](CausalLM& model, int64_t first, int64_t count) {
    const auto rows = tokens.narrow(0, first, count);
    return model.loss_sum({.tokens = rows}, testing::next_labels(rows)).item<double>();
  };
  const AdapterConfig config{.rank = 2, .dropout = 0.5};
  const auto make = [&] {
    auto model = adapted(config);
    set_b(*model, 0.3);
    return model;
  };
  const auto whole = make(), halves = make(), quiet = make(), other = make();
  const double all = loss(*whole, 0, 4);
  EXPECT_NEAR(loss(*halves, 0, 2) + loss(*halves, 2, 2), all, 1e-5 * all) << "rows follow one another";
  adapter_dropout(*other)->seed = 1;
  EXPECT_GT(std::abs(loss(*other, 0, 4) - all), 1e-3);
  EXPECT_GT(std::abs(loss(*whole, 0, 4) - all), 1e-3) << "the next rows of the run";
  quiet->train(false);
  EXPECT_EQ(loss(*quiet, 0, 4), loss(*quiet, 0, 4));
  const auto plain = adapted({.rank = 2});
  set_b(*plain, 0.3);
  EXPECT_EQ(loss(*quiet, 0, 4), loss(*plain, 0, 4));
}

}  // namespace
}  // namespace tessera
