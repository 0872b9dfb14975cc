// Meetings of many ranks, of late ranks, and with errors.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/launch/launcher.h"
#include "tessera/comm/rendezvous/thread_ranks.h"
#include "tests/comm/fleet.h"
#include "tests/support/prompt.h"

namespace tessera::comm {
namespace {

using std::chrono::seconds;

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::kPromptSeconds;

void expect_sums(World& world) {
  at::Tensor sum = at::full({3}, world.rank() + 1.0), pair_sum = at::ones({1});
  all_reduce(*world.group(), sum).wait();
  all_reduce(*world.new_group({world.rank() & ~1, world.rank() | 1}, "pair"), pair_sum).wait();
  const auto wanted = static_cast<float>(world.size() * (world.size() + 1) / 2);
  TESSERA_CHECK(sum[2].item<float>() == wanted && pair_sum.item<float>() == 2.0F, ErrorKind::kInternal,
                "[test] wrong sum {}", sum[2].item<float>());
}

TEST(Rendezvous, SixtyFourThreadRanksStartInOneRun) {
  std::atomic<int> ended{0};
  run_thread_ranks(64, [&](const auto& world) {
    expect_sums(*world);
    ++ended;
  });
  EXPECT_EQ(ended, 64);
}

TEST(Rendezvous, SixteenProcessRanksStartInOneRun) {
  Fleet fleet(16, {.timeout = seconds(50)}, [](const auto& world) { expect_sums(*world); });
  for (int rank = 0; rank < 16; ++rank) {
    EXPECT_EQ(fleet.end_of(rank).code, 0) << rank << ": " << fleet.end_of(rank).text;
  }
}

// Not a test. A rank of the launcher below runs this code.
TEST(DISABLED_LaunchedRank, Main) {
  int code = 0;
  try {
    const auto world = World::connect({.timeout = seconds(30)});
    expect_sums(*world);
    if (world->size() != 4) code = 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    code = exit_code_for(error);
  }
  std::_Exit(code);
}

int run_launcher(int node, int port) {
  return launch_local_ranks(
      {std::filesystem::read_symlink("/proc/self/exe").string(), "--gtest_also_run_disabled_tests",
       "--gtest_filter=DISABLED_LaunchedRank.Main", "--gtest_brief=1"},
      {.nproc = 2, .nnodes = 2, .node_rank = node, .master = "127.0.0.1:" + std::to_string(port)});
}

TEST(Rendezvous, TwoLaunchersOnOneMachineJoinOneRun) {
  const int port = free_port();
  std::fflush(nullptr);
  const pid_t second = ::fork();
  if (second == 0) ::_exit(run_launcher(1, port));
  EXPECT_EQ(run_launcher(0, port), 0);
  int status = -1;
  ::waitpid(second, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(Rendezvous, PortInUseIsReportedAndEndsAllRanks) {
  const int port = free_port(), listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  ASSERT_EQ(::bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(::listen(listener, 8), 0);
  const double begun = clock_seconds();
  Fleet fleet(
      2, {.timeout = seconds(3)}, [](const auto&) {}, port);
  EXPECT_EQ(fleet.end_of(0).code, 4);
  EXPECT_THAT(fleet.end_of(0).text, HasSubstr(fmt::format("port {} of 127.0.0.1 is in use. Choose another one", port)));
  EXPECT_LT(fleet.end_of(0).time - begun, kPromptSeconds);
  EXPECT_EQ(fleet.end_of(1).code, 4) << fleet.end_of(1).text;
  EXPECT_THAT(fleet.end_of(1).text,
              HasSubstr(fmt::format("rank 1 of 2 found no store at 127.0.0.1:{} within 3 s", port)));
  EXPECT_LT(fleet.end_of(1).time - begun, kPromptSeconds);
  ::close(listener);
}

TEST(Rendezvous, ALateRankIsWaitedFor) {
  for (const int late : {0, 2}) {
    Fleet fleet(
        3, {.timeout = seconds(20)}, [](const auto& world) { barrier(*world->group()); }, free_port(),
        [&](int rank) {
          if (rank == late) std::this_thread::sleep_for(seconds(2));
        });
    for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(fleet.end_of(rank).code, 0) << fleet.end_of(rank).text;
  }
}

TEST(Rendezvous, MissingRankIsNamedByAllRanks) {
  const double begun = clock_seconds();
  Fleet fleet(
      3, {.timeout = seconds(2)}, [](const auto&) {}, free_port(),
      [](int rank) {
        if (rank == 2) ::_exit(0);
      });
  for (const int rank : {0, 1}) {
    EXPECT_EQ(fleet.end_of(rank).code, 4);
    EXPECT_THAT(fleet.end_of(rank).text, HasSubstr("rank 2 of 3 did not arrive within 2 s")) << rank;
    EXPECT_LT(fleet.end_of(rank).time - begun, kPromptSeconds);
  }
}

TEST(Rendezvous, SecondRunOnTheSamePortIsRefusedAndTheFirstContinues) {
  const int port = free_port();
  const auto body = [](const auto& world) {
    Fleet::ready();
    std::this_thread::sleep_for(seconds(3));
    barrier(*world->group());
  };
  Fleet first(2, {.timeout = seconds(20)}, body, port);
  ASSERT_TRUE(first.await_ready());
  Fleet second(2, {.timeout = seconds(20)}, body, port);
  EXPECT_EQ(second.end_of(0).code, 4);
  EXPECT_THAT(second.end_of(0).text, HasSubstr("is in use"));
  EXPECT_EQ(second.end_of(1).code, 2);
  EXPECT_THAT(second.end_of(1).text, HasSubstr("two processes say that they are rank 1 of 2"));
  for (const int rank : {0, 1}) EXPECT_EQ(first.end_of(rank).code, 0) << first.end_of(rank).text;
}

}  // namespace
}  // namespace tessera::comm
