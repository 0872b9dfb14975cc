// Tests of random chats through the templates of the assets against transformers: a few chats for each template, with a
// new seed in each run.
#include <gtest/gtest.h>

#include <random>

#include "tests/trials/chat_shapes.h"

namespace tessera::trials {
namespace {

TEST(ChatShapes, RandomChatsMatchTransformersAndHaveTheExpectedLabels) {
  const uint64_t seed = std::random_device{}();
  RecordProperty("seed", std::to_string(seed));
  std::printf("[   SEED   ] %llu\n", static_cast<unsigned long long>(seed));
  constexpr int kEach = 5;  // 350 chats in all for 70 templates
  const testing::TempFolder folder;
  const auto shapes = draw_shapes(folder, seed, kEach);
  ShapeChecks checks(folder);
  for (const auto& [name, path] : template_files()) checks.run(name, read_file(path), shapes.at(name));
  for (size_t i = 0; i < std::min<size_t>(checks.faults().size(), 10); ++i) ADD_FAILURE() << checks.faults()[i];
  EXPECT_EQ(checks.cases, 350);
  EXPECT_GT(checks.errors, 20) << "some conversations are refused by their template";
  EXPECT_GT(checks.samples, 200);
  EXPECT_GT(checks.exact_turns, 100);
}

}  // namespace
}  // namespace tessera::trials
