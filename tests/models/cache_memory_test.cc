// Tests of the number of tokens that a KV cache holds, which follows from the free memory.
#include "tessera/models/generation/cache_memory.h"

#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/machine/available_memory.h"
#include "tessera/models/generation/engine.h"
#include "tests/models/tiny.h"

namespace tessera {
namespace {

TEST(CacheMemory, IsAtLeastOneContextAndAtMostTheMemory) {
  constexpr int64_t kPage = 1000;
  const auto tokens = [](int64_t bytes, int64_t wanted) {
    return cache_tokens_within({.bytes = bytes, .page_bytes = kPage}, /*context=*/64, wanted);
  };
  EXPECT_EQ(tokens(100 * kPage, 512), 512);
  EXPECT_EQ(tokens(100 * kPage, 0), 64) << "a context";
  EXPECT_EQ(tokens(20 * kPage + kPage - 1, 512), 20 * kernels::kPageTokens) << "whole pages";
  EXPECT_EQ(tokens(2 * kPage, 512), 2 * kernels::kPageTokens) << "less than a context";
  EXPECT_EQ(tokens(kPage - 1, 512), kernels::kPageTokens) << "a page";
  EXPECT_EQ(cache_tokens_within({.bytes = int64_t{80} << 30, .page_bytes = 1}, 64, 1000), 1000);
}

TEST(CacheMemory, CpuCacheIsWithinTheCgroupLimit) {
  constexpr int64_t kGiB = int64_t{1} << 30;
  AvailableMemory memory{.machine_bytes = 512 * kGiB, .machine_available_bytes = 500 * kGiB};
  EXPECT_EQ(cache_bytes_within(memory), 128 * kGiB);
  memory.limit_bytes = memory.limit_available_bytes = 8 * kGiB;
  EXPECT_EQ(cache_bytes_within(memory), 2 * kGiB) << "of a container";
  memory.limit_available_bytes = kGiB;
  EXPECT_EQ(cache_bytes_within(memory), kGiB / 4 * 3) << "beside its weights";
  memory.machine_available_bytes = kGiB / 2;
  EXPECT_EQ(cache_bytes_within(memory), kGiB / 8 * 3) << "beside other processes";

  const auto model = testing::tiny_model();
  EXPECT_EQ(free_device_bytes(at::kCPU), std::nullopt);
  const int64_t page = Engine::page_bytes(model->config(), sizeof(float));
  const int64_t most = cache_tokens(*model, int64_t{1} << 50);
  EXPECT_LE(most / kernels::kPageTokens * page, read_available_memory().total_bytes() / 4);
  EXPECT_GT(most, 0);
  EXPECT_EQ(cache_tokens(*model, 0), model->config().max_position_embeddings);
}

TEST(CacheMemory, CacheLargerThanTheMemoryLimitIsAnError) {
  const AvailableMemory memory{.machine_bytes = 1000, .machine_available_bytes = 700, .limit_bytes = 500};
  EXPECT_NO_THROW(check_cache_fits(memory, 5 * kernels::kPageTokens, 100));
  for (const int64_t tokens : {5 * kernels::kPageTokens + 1, int64_t{1} << 40}) {
    try {
      check_cache_fits(memory, tokens, int64_t{100} << 30);
      FAIL() << "it was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kConfig);
      EXPECT_NE(std::string(error.what()).find(fmt::format("a cache of {} tokens", tokens)), std::string::npos)
          << error.what();
    }
  }
}

TEST(CacheMemory, EngineAllocatesItsPagesBeforeItsFirstStep) {
  const auto model = testing::tiny_model();
  Engine engine(model, {.pages = 4});
  engine.allocate_pages();
  EXPECT_EQ(engine.counts().new_tokens, 0);
  EXPECT_EQ(engine.counts().pages_in_use, 0);
  // The next engine's KV cache takes 16 TiB, so the allocation must fail.
  if (read_file("/proc/sys/vm/overcommit_memory", 16).starts_with("1")) {
    GTEST_SKIP() << "this system refuses nothing";
  }
  const auto wide = testing::tiny_model(R"("head_dim": 65536)");
  const int64_t page = Engine::page_bytes(wide->config(), sizeof(float));
  Engine large(wide, {.pages = (int64_t{1} << 44) / page});
  try {
    large.allocate_pages();
    FAIL() << "it was made";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kMemory);
    EXPECT_NE(std::string(error.what()).find("--cache-tokens"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace tessera
