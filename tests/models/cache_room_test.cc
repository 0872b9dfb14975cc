// How many tokens a cache holds, from what is free.
#include "tessera/models/generation/cache_room.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "tessera/models/generation/engine.h"
#include "tests/models/tiny.h"

namespace tessera {
namespace {

TEST(CacheRoom, IsWhatIsWantedAContextAtLeastAndWhatTheMemoryHolds) {
  constexpr int64_t kPage = 1000;
  const auto tokens = [](int64_t bytes, int64_t wanted) {
    return cache_tokens_within({.bytes = bytes, .page_bytes = kPage}, /*context=*/64, wanted);
  };
  EXPECT_EQ(tokens(100 * kPage, 512), 512);
  EXPECT_EQ(tokens(100 * kPage, 0), 64) << "a context";
  EXPECT_EQ(tokens(20 * kPage + kPage - 1, 512), 20 * kPageTokens) << "whole pages";
  EXPECT_EQ(tokens(2 * kPage, 512), 2 * kPageTokens) << "less than a context";
  EXPECT_EQ(tokens(kPage - 1, 512), kPageTokens) << "a page";
  EXPECT_EQ(cache_tokens_within({.bytes = int64_t{80} << 30, .page_bytes = 1}, 64, 1000), 1000);
}

TEST(CacheRoom, OnTheCpuIsAQuarterOfTheMemoryInFloat32) {
  const auto model = testing::tiny_model();
  EXPECT_EQ(free_device_bytes(at::kCPU), std::nullopt);
  const int64_t memory = int64_t{::sysconf(_SC_PHYS_PAGES)} * ::sysconf(_SC_PAGE_SIZE);
  const int64_t page = Engine::page_bytes(model->config(), sizeof(float));
  EXPECT_EQ(cache_tokens(*model, int64_t{1} << 50), memory / 4 / page * kPageTokens);
  EXPECT_EQ(cache_tokens(*model, 0), model->config().max_position_embeddings);
}

}  // namespace
}  // namespace tessera
