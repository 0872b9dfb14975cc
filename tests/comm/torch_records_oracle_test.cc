// PyTorch's flight-record analyzer on our records of a run that hung and of a run whose ranks disagreed.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/rendezvous/thread_ranks.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::TempFolder;

// Runs ranks that fail, and returns the analyzer's result for their records.
nlohmann::json analyzed(const TempFolder& folder, int size, const std::function<void(World&)>& body,
                        const std::string& check = "timeout") {
  EXPECT_THROW(run_thread_ranks(size, [&](const std::shared_ptr<World>& world) { body(*world); },
                                {.backend = "gloo",
                                 .timeout = std::chrono::seconds(2),
                                 .check = check,
                                 .trace_folder = (folder / "trace").string()}),
               std::exception);
  const auto trace = testing::run_process(
      {testing::program(), "trace", (folder / "trace").string(), "--torch", (folder / "torch").string()});
  EXPECT_EQ(trace.exit_code, 0) << trace.err;
  const auto run = testing::run_python("tests/comm/oracle/analyze_records.py", {(folder / "torch").string()});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  return run.exit_code == 0 ? nlohmann::json::parse(run.out) : nlohmann::json();
}

TEST(TorchRecords, TheAnalyzerNamesTheMissingRank) {
  const TempFolder folder;
  const auto found = analyzed(folder, 3, [](World& world) {
    Group& group = *world.group();
    at::Tensor sum = at::ones({4, 2}), part = at::ones({3}), all = at::empty({9});
    all_reduce(group, sum).wait();
    all_gather_into(group, all, part, "weights").wait();
    reduce_scatter_into(group, part, all, ReduceOp::kSum).wait();
    broadcast(group, sum, 1).wait();
    barrier(group);
    if (world.rank() < 2) {
      const auto pair = world.new_group({0, 1}, "pair");
      world.rank() == 0 ? send(*pair, part, 1).wait() : recv(*pair, part, 0).wait();
    }
    if (world.rank() != 2) all_reduce(group, sum).wait();
    std::this_thread::sleep_for(std::chrono::seconds(4));
    all_reduce(group, part).wait();
  });
  ASSERT_FALSE(found.is_null());
  EXPECT_THAT(found["groups"].dump(),
              AllOf(HasSubstr(R"({"desc":"world","size":3})"), HasSubstr(R"({"desc":"pair","size":2})")));
  int passed = 0, missing = 0;
  for (const auto& one : found["collectives"]) {
    if (one["passes"] && one["missing"].empty()) ++passed;
    if (one["missing"] == nlohmann::json{2}) {
      ++missing;
      EXPECT_EQ(one["name"], "gloo:all_reduce");
      EXPECT_EQ(one["sequence"], 6);
    }
  }
  EXPECT_GE(passed, 6) << found;
  EXPECT_EQ(missing, 1) << found;
}

TEST(TorchRecords, TheAnalyzerNamesTheMismatchedCall) {
  const TempFolder folder;
  const auto found = analyzed(
      folder, 2,
      [](World& world) {
        at::Tensor same = at::ones({4}), own = at::ones({world.rank() == 0 ? 4 : 8});
        all_reduce(*world.group(), same).wait();
        all_reduce(*world.group(), own).wait();
      },
      "always");
  ASSERT_FALSE(found.is_null());
  EXPECT_THAT(found.dump(), HasSubstr("SIZE_OR_SYNTAX_MISMATCH")) << found;
}

}  // namespace
}  // namespace tessera::comm
