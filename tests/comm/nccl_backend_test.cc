#include "tessera/comm/backends/nccl_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/comm/rendezvous/world.h"

namespace tessera::comm {
namespace {

using ::testing::HasSubstr;

TEST(Nccl, WhereItIsMissingTheErrorSaysWhatAndNamesTheRemedy) {
  constexpr int kRanks = 4096;  // more than any machine has GPUs
  const std::string reason = why_no_nccl(kRanks);
  ASSERT_FALSE(reason.empty());
  try {
    make_nccl_backend(nullptr, {.rank = 0, .size = kRanks, .ranks_on_host = kRanks});
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
    EXPECT_THAT(error.what(), HasSubstr("[comm.nccl] " + reason));
    EXPECT_THAT(error.what(), HasSubstr("Use comm.backend=gloo"));
  }
}

TEST(Nccl, AGroupForGpusIsRefusedOnAllRanksWhereThereAreNone) {
  if (why_no_nccl(2).empty()) GTEST_SKIP() << "this machine has two GPUs";
  try {
    run_thread_ranks(2, [](const auto& world) { world->group(c10::DeviceType::CUDA); });
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig) << error.what();
  }
}

}  // namespace
}  // namespace tessera::comm
