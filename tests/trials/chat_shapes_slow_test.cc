// Slow tests of random chats through the templates of the assets against transformers: 200 chats for each template.
#include <gtest/gtest.h>

#include <random>

#include "tests/trials/chat_shapes.h"

namespace tessera::trials {
namespace {

TEST(ChatShapes, FourteenThousandRandomChatsMatchTransformersAndHaveTheExpectedLabels) {
  const uint64_t seed = std::random_device{}();
  RecordProperty("seed", std::to_string(seed));
  std::printf("[   SEED   ] %llu\n", static_cast<unsigned long long>(seed));
  const testing::TempFolder folder;
  const auto shapes = draw_shapes(folder, seed, 200);
  ShapeChecks checks(folder);
  for (const auto& [name, path] : template_files()) checks.run(name, read_file(path), shapes.at(name));
  for (size_t i = 0; i < std::min<size_t>(checks.faults().size(), 10); ++i) ADD_FAILURE() << checks.faults()[i];
  EXPECT_EQ(checks.cases, 70 * 200);
  EXPECT_GT(checks.samples, 9000);
  EXPECT_GT(checks.exact_turns, 4000);
}

}  // namespace
}  // namespace tessera::trials
