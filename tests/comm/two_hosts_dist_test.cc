// One run over two hosts: two launchers, each in a network namespace of its own.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/launch/launcher.h"
#include "tessera/comm/rendezvous/rendezvous.h"
#include "tests/support/two_hosts.h"

namespace tessera::comm {
namespace {

namespace fs = std::filesystem;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kRanksOnHost = 2;

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

fs::path notes() { return std::getenv("TESSERA_TEST_NOTES"); }

// The program of a rank. All modes sum over all ranks and over the ranks of the host; "talk" then runs barriers until
// an error; "alone" has a timeout of 3 s.
void run_rank(const std::string& mode) {
  const auto world = World::connect({.timeout = mode == "alone" ? seconds(3) : seconds(40)});
  Group& all = *world->group();
  at::Tensor sum = at::full({100'000}, world->rank() + 1.0F);
  all_reduce(all, sum).wait();
  const int first = world->rank() / kRanksOnHost * kRanksOnHost;
  const auto neighbours = world->new_group({first, first + 1}, "host");
  at::Tensor near = at::full({3}, world->rank() + 1.0F);
  all_reduce(*neighbours, near).wait();
  TESSERA_CHECK(all.backend().getBackendName() == "mixed", ErrorKind::kInternal, "[test] {} over two hosts",
                all.backend().getBackendName());
  publish_file(notes() / fmt::format("rank-{}", world->rank()),
               fmt::format("{} {} {} {} {}", sum[99'999].item<float>(), near[2].item<float>(),
                           neighbours->backend().getBackendName(), world->info().local_rank, world->info().local_size));
  while (mode == "talk") barrier(all);
}

TEST(DISABLED_RankOfAHost, Main) {
  int code = 0;
  try {
    run_rank(std::getenv("TESSERA_TEST_MODE"));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    code = exit_code_for(error);
  }
  std::fflush(nullptr);
  std::_Exit(code);
}

class TwoHosts : public testing::TwoHostsTest {
 protected:
  // `masters` has, for each host, the address under which the host looks for rank 0.
  void start(const std::string& mode,
             const std::array<std::string, 2>& masters = {testing::kFirstHost, testing::kFirstHost},
             const std::function<void(int)>& prepare = nullptr) {
    TwoHostsTest::start([=, this](int number) {
      if (prepare) prepare(number);
      ::setenv("TESSERA_TEST_NOTES", folder_.path().c_str(), 1);
      ::setenv("TESSERA_TEST_MODE", mode.c_str(), 1);
      return launch_local_ranks({fs::read_symlink("/proc/self/exe").string(), "--gtest_also_run_disabled_tests",
                                 "--gtest_filter=DISABLED_RankOfAHost.Main", "--gtest_brief=1"},
                                {.nproc = kRanksOnHost, .nnodes = 2, .node_rank = number, .master = masters[number]});
    });
  }
  // The result that rank `rank` has written.
  std::string note(int rank) const {
    const fs::path path = folder_ / fmt::format("rank-{}", rank);
    return fs::exists(path) ? read_file(path) : "nothing";
  }
};

TEST_F(TwoHosts, JoinOneRunEvenIfOneIsLate) {
  start("sum");
  if (IsSkipped() || HasFatalFailure()) return;
  hosts_[1]->go();
  std::this_thread::sleep_for(seconds(2));
  hosts_[0]->go();
  for (const auto& host : hosts_) EXPECT_EQ(host->wait(), 0) << host->said();
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(note(rank), fmt::format("10 {} shm {} 2", rank < 2 ? 3 : 7, rank % 2));
}

// The master's name may lead to loopback on the master's own host: Debian maps a host's own name to 127.0.1.1, and
// Kubeflow sets localhost for the first host. The ranks there must still find the route to the other hosts.
TEST_F(TwoHosts, RendezvousWhenTheMasterNameResolvesToLoopback) {
  resolve(0, "first.invalid", "127.0.1.1");
  resolve(1, "first.invalid", "10.77.0.1");
  start("sum", {"first.invalid:29471", "first.invalid:29471"});
  if (IsSkipped() || HasFatalFailure()) return;
  for (const auto& host : hosts_) host->go();
  for (const auto& host : hosts_) EXPECT_EQ(host->wait(), 0) << host->said();
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(note(rank), fmt::format("10 {} shm {} 2", rank < 2 ? 3 : 7, rank % 2));
  EXPECT_THAT(hosts_[0]->said() + hosts_[1]->said(), Not(HasSubstr("[comm.watchdog]")));  // the watchdog runs too
}

// The interface setting applies to the other sockets only. Ranks connect to the store by the master's name.
TEST_F(TwoHosts, RendezvousWhenTheInterfaceSettingDiffersFromTheMasterAddress) {
  resolve(0, "first.invalid", "127.0.1.1");
  resolve(1, "first.invalid", "10.77.0.1");
  start("sum", {"first.invalid:29471", "first.invalid:29471"}, [](int number) {
    if (number == 0) ::setenv("NCCL_SOCKET_IFNAME", "fast", 1);
  });
  if (IsSkipped() || HasFatalFailure()) return;
  in_host(0, {"ip", "link", "add", "fast", "type", "veth", "peer", "name", "slow"});
  in_host(0, {"ip", "address", "add", "10.78.0.1/24", "dev", "fast"});
  for (const char* end : {"fast", "slow"}) in_host(0, {"ip", "link", "set", end, "up"});
  in_host(1, {"ip", "route", "add", "10.78.0.0/24", "via", "10.77.0.1"});
  for (const auto& host : hosts_) host->go();
  for (const auto& host : hosts_) EXPECT_EQ(host->wait(), 0) << host->said();
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(note(rank), fmt::format("10 {} shm {} 2", rank < 2 ? 3 : 7, rank % 2));
}

TEST_F(TwoHosts, RendezvousWhenTheMasterIsSetToLocalhost) {
  start("sum", {"localhost:29471", testing::kFirstHost});
  if (IsSkipped() || HasFatalFailure()) return;
  for (const auto& host : hosts_) host->go();
  for (const auto& host : hosts_) EXPECT_EQ(host->wait(), 0) << host->said();
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(note(rank), fmt::format("10 {} shm {} 2", rank < 2 ? 3 : 7, rank % 2));
}

TEST_F(TwoHosts, RanksOfAMissingHostAreNamed) {
  start("alone");
  if (IsSkipped() || HasFatalFailure()) return;
  hosts_[0]->go();
  EXPECT_EQ(hosts_[0]->wait(), 4);
  EXPECT_THAT(hosts_[0]->said(), HasSubstr("rank 2, 3 of 4 did not arrive within 3 s at 10.77.0.1:29471"));
}

TEST_F(TwoHosts, DisconnectedHostEndsTheRunOnBothSides) {
  ::setenv("TESSERA_SILENCE_SECONDS", "4", 1);  // the default between hosts is 60 s
  start("talk");
  if (IsSkipped() || HasFatalFailure()) return;
  for (const auto& host : hosts_) host->go();
  for (const double limit = now_seconds() + 40;
       now_seconds() < limit && (note(0) == "nothing" || note(3) == "nothing");) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  in_host(1, {"ip", "link", "set", "wire", "down"});
  const double cut = now_seconds();
  for (const auto& host : hosts_) EXPECT_EQ(host->wait(), 4) << host->said();
  EXPECT_LT(now_seconds() - cut, 35);  // their collectives time out after 40 s
  EXPECT_THAT(hosts_[0]->said(),
              AllOf(AnyOf(HasSubstr("rank 2 has"), HasSubstr("rank 3 has")),
                    HasSubstr("sent no message for 4 s: it is stopped, or its host is down or unreachable")));
  EXPECT_THAT(hosts_[1]->said(), HasSubstr("rank 0 has sent no message for 4 s"));
}

}  // namespace
}  // namespace tessera::comm
