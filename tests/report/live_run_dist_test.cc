// train.page of a real run: the page exists while the run trains and ends with it. If the port is in use, the run ends
// before it begins.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "tests/support/http_client.h"
#include "tests/train/tiny_run.h"

namespace tessera::report {
namespace {

using ::testing::AllOf;
using testing::free_port;
using testing::get;
using ::testing::HasSubstr;
using train::TinyRun;

size_t rows_told(const std::string& answer) {
  const size_t at = answer.find("\"rows\":");
  return at == answer.npos ? 0 : static_cast<size_t>(std::atoll(answer.c_str() + at + 7));
}

TEST(LiveRun, ThePageUpdatesDuringTheRunAndEndsWithIt) {
  const TinyRun runs;
  const int port = free_port();
  auto run = std::async(std::launch::async, [&] {
    return runs.train("live", 2, {fmt::format("train.page={}", port), "train.steps=300", "checkpoint.every=0"});
  });
  size_t first = 0, later = 0;
  std::string page;
  while (run.wait_for(std::chrono::milliseconds(10)) != std::future_status::ready && (first == 0 || later <= first)) {
    const auto answer = get(port, "/data.json");
    if (page.empty() && answer != "refused") page = get(port, "/");
    (first == 0 ? first : later) = rows_told(answer);
  }
  const auto result = run.get();
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_GT(first, 0u);
  EXPECT_GT(later, first) << "while it trained";
  EXPECT_THAT(page, AllOf(HasSubstr("200 OK"), HasSubstr("uPlot")));
  EXPECT_THAT(result.err, HasSubstr(fmt::format("http://127.0.0.1:{}", port)));
  EXPECT_EQ(get(port, "/"), "refused");
}

TEST(LiveRun, APortInUseEndsAllRanksBeforeAnythingIsWritten) {
  const TinyRun runs;
  const testing::TakenPort taken;
  const int port = taken.number();
  const auto run = runs.train("none", 2, {fmt::format("train.page={}", port)});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_THAT(run.err,
              AllOf(HasSubstr(fmt::format("port {} of 127.0.0.1: found it in use", port)), HasSubstr("train.page")));
  EXPECT_FALSE(std::filesystem::exists(runs / "none" / "metrics.jsonl"));
  const auto without = runs.train("none", 1, {"train.page=8080", "log.jsonl=false"});
  EXPECT_EQ(without.exit_code, 2);
  EXPECT_THAT(without.err, HasSubstr("log.jsonl, which is false"));
}

}  // namespace
}  // namespace tessera::report
