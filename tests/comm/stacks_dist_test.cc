// A test that reaches its time limit prints the stacks of all threads of its processes.
#include <filesystem>

#include "tests/comm/fleet.h"
#include "tests/comm/killed_ranks.h"
#include "tests/support/process.h"
#include "tests/support/stacks/stacks.h"

namespace tessera::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr const char* kHangingFunction = "hang_forever_on_purpose";

[[gnu::noinline]] void hang_forever_on_purpose() {
  for (;;) std::this_thread::sleep_for(std::chrono::seconds(1));
}

std::string own_program() { return std::filesystem::read_symlink("/proc/self/exe").string(); }

TEST(Stacks, StacksOfAllThreadsOfARankArePrinted) {
  Fleet fleet(2, {.timeout = std::chrono::seconds(60)}, [](const auto& world) {
    barrier(*world->group());
    Fleet::ready();
    hang_forever_on_purpose();
  });
  ASSERT_TRUE(fleet.await_ready());
  const auto printed = testing::run_process({testing::print_stacks_program(), std::to_string(fleet.process(0))});
  EXPECT_EQ(printed.exit_code, 0);
  EXPECT_THAT(printed.err, AllOf(HasSubstr(kHangingFunction), HasSubstr("gloo::transport::tcp::Loop::run()"),
                                 HasSubstr("tessera::comm::WatchdogLoop::run()")));
}

// A program with the time limit that ctest gives a test prints its own stacks and the stacks of its ranks.
TEST(Stacks, StacksArePrintedBeforeTheCtestTimeout) {
  const auto run = testing::run_process(
      {own_program(), "--gtest_also_run_disabled_tests", "--gtest_filter=Stacks.DISABLED_TestThatHangs"},
      {.environment = {{"TESSERA_TEST_SECONDS", "23"}, {"GTEST_TOTAL_SHARDS", "1"}, {"GTEST_SHARD_INDEX", "0"}}});
  EXPECT_EQ(run.exit_code, 99);
  EXPECT_THAT(run.err, AllOf(HasSubstr("about to run out of its time"), HasSubstr(kHangingFunction),
                             HasSubstr("gloo::transport::tcp::Loop::run()")));
}

TEST(Stacks, DISABLED_TestThatHangs) {
  Fleet fleet(2, {.timeout = std::chrono::seconds(60)}, [](const auto& world) {
    barrier(*world->group());
    hang_forever_on_purpose();
  });
  fleet.end_of(0);
}

// The stacks of a program that a test starts are printed too.
TEST(Stacks, StacksOfAStartedProgramArePrinted) {
  ::testing::internal::CaptureStderr();
  const testing::TempFolder folder;
  const std::string pipe = (folder.path() / "recipe.yaml").string();
  const auto run = testing::run_process(
      {"sh", "-c", "mkfifo \"$1\"; exec \"$2\" train \"$1\"", "sh", pipe, testing::program()}, {.timeout_seconds = 3});
  EXPECT_EQ(run.exit_code, 137);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("train " + pipe), HasSubstr("tessera::"), HasSubstr("main+")));
}

}  // namespace
}  // namespace tessera::comm
