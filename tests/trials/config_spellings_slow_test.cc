// Slow test of many random spellings of config.json against transformers.
#include "tests/trials/config_spellings.h"

namespace tessera {
namespace {

TEST(ConfigSpellings, ManyMatchTransformersOrGiveAnErrorThatNamesTheKey) {
  const auto counts = testing::check_config_spellings(41, 20'000, 2500);
  EXPECT_GT(counts.equal, 5000);
  for (const auto& key : testing::documented_keys("What transformers takes and Tessera refuses")) {
    EXPECT_TRUE(counts.keys_of_refusals.contains(key)) << "no case of docs/format/config.md's " << key;
  }
}

}  // namespace
}  // namespace tessera
