// Test of random spellings of config.json against transformers, with a new seed in each run.
#include <random>

#include "tests/trials/config_spellings.h"

namespace tessera {
namespace {

TEST(ConfigSpellings, MatchTransformersOrGiveAnErrorThatNamesTheKey) {
  const auto counts = testing::check_config_spellings(std::random_device()(), 300, 200);
  EXPECT_GT(counts.equal, 80);
}

}  // namespace
}  // namespace tessera
