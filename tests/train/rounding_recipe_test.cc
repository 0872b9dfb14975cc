// Tests of optimizer.stochastic_rounding: its requirements, and the text that a run prints about it.
#include <gmock/gmock.h>

#include "tessera/base/error.h"
#include "tessera/train/run/run_setup.h"

namespace tessera::train {
namespace {

using ::testing::HasSubstr;

Recipe rounding_recipe(const std::vector<std::string>& overrides) {
  return parse_recipe("model: {path: m}\ndata: {train: [d]}\n", "r.yaml", overrides);
}

TEST(StochasticRoundingRecipe, IsDescribed) {
  const auto recipe = rounding_recipe(
      {"model.dtype=bfloat16", "optimizer.master_weights=false", "optimizer.stochastic_rounding=true", "train.seed=7"});
  EXPECT_TRUE(recipe.optimizer.stochastic_rounding);
  EXPECT_THAT(describe_precision(recipe), HasSubstr("parameters are bfloat16 without a float32 copy"));
  EXPECT_THAT(describe_precision(recipe), HasSubstr("train.seed=7"));
  EXPECT_FALSE(rounding_recipe({}).optimizer.stochastic_rounding);
}

TEST(StochasticRoundingRecipe, IsRefusedUnlessParametersAreBfloat16WithoutMasterWeights) {
  const std::vector<std::vector<std::string>> wrong = {
      {"optimizer.stochastic_rounding=true"},
      {"optimizer.stochastic_rounding=true", "model.dtype=bfloat16"},
      {"optimizer.stochastic_rounding=true", "optimizer.master_weights=false"}};
  for (const auto& overrides : wrong) {
    try {
      rounding_recipe(overrides);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kConfig);
      EXPECT_THAT(error.what(), HasSubstr("optimizer.stochastic_rounding: found true with"));
    }
  }
}

}  // namespace
}  // namespace tessera::train
