// Drawn spellings of config.json, with a fresh seed each time.
#include <random>

#include "tests/trials/config_spellings.h"

namespace tessera {
namespace {

TEST(ConfigSpellings, GiveTheValuesOfTransformersOrAnErrorThatNamesTheKey) {
  const auto counts = testing::check_config_spellings(std::random_device()(), 300, 200);
  EXPECT_GT(counts.equal, 80);
}

}  // namespace
}  // namespace tessera
