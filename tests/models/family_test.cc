// Tests of the table of model families: names, GGUF tensors and the module names in tensor parallel plans.
#include "tessera/models/config/family.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "tessera/base/error.h"
#include "tessera/models/gguf/gguf_tensors.h"
#include "tests/models/tiny.h"

namespace tessera {
namespace {

TEST(ModelFamily, EveryFamilyIsFoundByItsNamesAndMakesItsModel) {
  std::set<std::string_view> names;
  for (const auto* family : model_families()) {
    EXPECT_TRUE(names.insert(family->architecture).second && names.insert(family->model_type).second);
    EXPECT_EQ(find_family(family->architecture), family);
    EXPECT_EQ(find_family_of_type(family->model_type), family);
    EXPECT_EQ(find_family(family->model_type), nullptr) << "a model type is no architecture";
    const auto config =
        ModelConfig::parse(fmt::format(R"({{"model_type": "{}", "num_hidden_layers": 1}})", family->model_type), "t");
    EXPECT_EQ(config.architecture, family->architecture);
    EXPECT_GT(make_model(config, {.device = at::kMeta})->parameters().size(), 4U);
  }
  EXPECT_EQ(find_family_of_gguf(""), nullptr);
  EXPECT_THROW(family_of("GPT2LMHeadModel"), Error);
}

// The tensors that gguf_tensors() lists are equal to the parameters of the model.
TEST(ModelFamily, GgufTensorsAreTheParametersOfTheModel) {
  for (const auto* family : model_families()) {
    if (family->gguf.architecture.empty()) continue;
    for (const bool plain : {true, false}) {
      const auto config = ModelConfig::parse(
          testing::tiny_config(
              fmt::format(R"("architectures": ["{}"], "tie_word_embeddings": {}, "attention_bias": {}, "mlp_bias": {})",
                          family->architecture, plain, !plain, !plain)),
          "t");
      std::map<std::string, std::vector<int64_t>> said, held;
      std::map<std::string, int64_t> rows;  // rows of each expert, in the parts of a stack
      for (const auto& tensor : gguf_tensors(family->gguf, config)) {
        said[tensor.hf_name] = tensor.shape;
        if (tensor.stacks == nullptr) continue;
        EXPECT_EQ(tensor.first_row, rows[tensor.hf_name]) << tensor.gguf_name;
        said[tensor.hf_name][1] = rows[tensor.hf_name] += tensor.shape[1];
        EXPECT_LE(rows[tensor.hf_name], tensor.stack_rows);
      }
      const auto model = make_model(config, {.device = at::kMeta});
      for (const auto& named : model->named_parameters()) held[named.name] = named.slot->parameter.sizes().vec();
      EXPECT_EQ(said, held) << family->architecture;
    }
  }
}

// Tensor parallel plans need these names.
TEST(ModelFamily, PlansNameExistingModules) {
  for (const auto* family : model_families()) {
    const auto config = ModelConfig::parse(
        testing::tiny_config(fmt::format(R"("architectures": ["{}"], "mlp_only_layers": [0])", family->architecture)),
        "t");
    const auto model = make_model(config, {.device = at::kMeta});
    std::set<std::string> names;
    for (const auto& [name, module] : model->named_modules()) names.insert(name);
    const std::string inner(family->plan.base_module);
    for (const char* child : {"embed_tokens", "norm", "rotary_emb", "layers.0.self_attn", "layers.0.mlp"}) {
      EXPECT_TRUE(names.contains(inner + "." + child)) << family->architecture << " " << child;
    }
    for (const auto& [pattern, style] : family->plan.layers) {
      auto name = inner + "." + std::string(pattern);
      name.replace(name.find('*'), 1, "0");
      EXPECT_TRUE(names.contains(name)) << family->architecture << " " << name;
    }
    for (const auto& [name, style] : family->plan.top) EXPECT_TRUE(names.contains(std::string(name))) << name;
    EXPECT_FALSE(family->plan.name.empty());
    EXPECT_EQ(model->blocks().size(), static_cast<size_t>(config.num_hidden_layers));
  }
}

}  // namespace
}  // namespace tessera
