#include "tessera/models/family.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "tessera/base/error.h"
#include "tessera/models/detail/gguf_llama.h"
#include "tests/models/tiny.h"

namespace tessera {
namespace {

TEST(ModelFamily, EveryRowIsFoundByItsNamesAndMakesItsModel) {
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

// What a GGUF file is said to hold is what the model has.
TEST(ModelFamily, GgufTensorsAreTheParametersOfTheModel) {
  for (const auto* family : model_families()) {
    if (!family->gguf_tensors) continue;
    for (const bool plain : {true, false}) {
      const bool biases = !plain && family->config.biases;
      const auto config = ModelConfig::parse(
          testing::tiny_config(
              fmt::format(R"("architectures": ["{}"], "tie_word_embeddings": {}, "attention_bias": {}, "mlp_bias": {})",
                          family->architecture, plain, biases, biases)),
          "t");
      const auto tensors = family->gguf_tensors({.layers = config.num_hidden_layers,
                                                 .hidden = config.hidden_size,
                                                 .ff = config.intermediate_size,
                                                 .heads = config.num_attention_heads,
                                                 .kv_heads = config.num_key_value_heads,
                                                 .head_dim = config.head_dim,
                                                 .vocab = config.vocab_size,
                                                 .tied = plain,
                                                 .attention_bias = biases,
                                                 .mlp_bias = biases});
      std::map<std::string, std::vector<int64_t>> said, held;
      for (const auto& tensor : tensors) said[tensor.hf_name] = tensor.shape;
      const auto model = make_model(config, {.device = at::kMeta});
      for (const auto& named : model->named_parameters()) {
        held[named.name] = named.slot->parameter.sizes().vec();
      }
      EXPECT_EQ(said, held) << family->architecture;
    }
  }
}

}  // namespace
}  // namespace tessera
