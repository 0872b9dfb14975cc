// NCCL on machines without it or without enough GPUs: the error messages, and the choice of the GPU.
#include "tessera/comm/backends/nccl_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/base/error.h"
#include "tessera/comm/rendezvous/thread_ranks.h"

namespace tessera::comm {
namespace {

using ::testing::HasSubstr;

TEST(Nccl, ErrorWithoutNcclNamesReasonAndRemedy) {
  constexpr int kRanks = 4096;  // more than any machine has GPUs
  const std::string reason = why_no_nccl(kRanks);
  ASSERT_FALSE(reason.empty());
  try {
    make_nccl_backend(
        {.store = nullptr, .group = "gpus", .rank = 0, .size = kRanks, .ranks_on_host = kRanks, .host = nullptr});
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
    EXPECT_THAT(error.what(), HasSubstr("[comm.nccl] " + reason));
    EXPECT_THAT(error.what(), HasSubstr("Use comm.backend=gloo"));
  }
}

TEST(GpuChoice, RankThatSeesOneGpuUsesIt) {
  EXPECT_EQ(gpu_of(5, 8), 5);
  EXPECT_EQ(gpu_of(5, 1), 0);  // as with Slurm's --gpus-per-task=1
  EXPECT_EQ(why_too_few_gpus(1, 8, true), "");
  EXPECT_EQ(why_too_few_gpus(8, 8, false), "");
  EXPECT_EQ(why_too_few_gpus(1, 8, false), "8 ranks on this host, but 1 GPU");
  EXPECT_EQ(why_too_few_gpus(4, 8, true), "8 ranks on this host, but 4 GPUs");
  EXPECT_THAT(why_too_few_gpus(0, 1, true), HasSubstr("no GPU is visible"));
}

TEST(Nccl, CudaGroupIsRefusedOnAllRanksWithoutGpus) {
  if (why_no_nccl(2).empty()) {
    GTEST_SKIP() << "this machine has two GPUs";
  }
  try {
    run_thread_ranks(2, [](const auto& world) { world->group(c10::DeviceType::CUDA); });
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig) << error.what();
  }
}

}  // namespace
}  // namespace tessera::comm
