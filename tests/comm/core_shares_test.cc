// The cores that the launcher gives to each rank, for hosts that the tests describe; and reading a host from /proc and
// /sys.
#include "tessera/comm/launch/core_shares.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>

#include "tessera/base/error.h"
#include "tests/support/temp_folder.h"

namespace tessera::comm {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Environment environment(std::map<std::string, std::string> values = {}) {
  return [values = std::move(values)](const char* name) -> std::optional<std::string> {
    const auto found = values.find(name);
    return found == values.end() ? std::nullopt : std::optional(found->second);
  };
}

// A host with two memory nodes of four cores each. Every core has two hyperthreads: logical cores n and n + 8.
HostCores two_nodes() {
  HostCores host;
  for (int number = 0; number < 16; ++number) {
    host.allowed.push_back({.number = number, .physical = number % 8, .node = number % 8 / 4});
  }
  return host;
}

CoreShares shares(const HostCores& host, int ranks, PinMode mode = PinMode::kAuto,
                  std::map<std::string, std::string> values = {}) {
  return share_cores(host, ranks, mode, environment(std::move(values)));
}

TEST(CoreShares, RanksGetFullCoresOfOneNumaNode) {
  const auto found = shares(two_nodes(), 4);
  ASSERT_EQ(found.of_ranks.size(), 4u) << found.unbound_reason;
  EXPECT_THAT(found.of_ranks[0].cores, ElementsAre(0, 8, 1, 9));
  EXPECT_THAT(found.of_ranks[3].cores, ElementsAre(6, 14, 7, 15));
  EXPECT_EQ(found.of_ranks[1].node, 0);
  EXPECT_EQ(found.of_ranks[2].node, 1);
  EXPECT_EQ(found.threads, 2);  // not 4, because two hyperthreads share a core
}

TEST(CoreShares, OnlyCoresOfTheAffinityMaskAreUsed) {
  HostCores host = two_nodes();
  std::erase_if(host.allowed, [](const LogicalCore& core) { return core.number < 2 || core.number > 7; });
  const auto found = shares(host, 2);  // as after taskset -c 2-7
  ASSERT_EQ(found.of_ranks.size(), 2u) << found.unbound_reason;
  EXPECT_THAT(found.of_ranks[0].cores, ElementsAre(2, 3, 4));
  EXPECT_EQ(found.of_ranks[0].node, -1);
  EXPECT_THAT(found.of_ranks[1].cores, ElementsAre(5, 6, 7));
  EXPECT_EQ(found.threads, 3);
}

TEST(CoreShares, RanksAreNotBoundWhenBindingCouldSlowThemDown) {
  EXPECT_THAT(shares(two_nodes(), 9).unbound_reason, HasSubstr("9 ranks share 8 cores"));
  EXPECT_THAT(shares(two_nodes(), 8).unbound_reason, HasSubstr("one core"));
  EXPECT_THAT(shares(two_nodes(), 1).unbound_reason, HasSubstr("all cores"));
  HostCores limited = two_nodes();
  limited.quota = 3.5;
  const auto found = shares(limited, 2);
  EXPECT_THAT(found.unbound_reason, HasSubstr("3.5 of 8 cores"));
  EXPECT_THAT(found.of_ranks, IsEmpty());
  EXPECT_EQ(found.threads, 1);
  EXPECT_EQ(shares(two_nodes(), 9).threads, 1);
}

TEST(CoreShares, UserSettingsTakePrecedence) {
  EXPECT_THAT(shares(two_nodes(), 4, PinMode::kAuto, {{"OMP_NUM_THREADS", "8"}}).unbound_reason,
              HasSubstr("OMP_NUM_THREADS=8"));
  EXPECT_EQ(shares(two_nodes(), 4, PinMode::kAuto, {{"OMP_NUM_THREADS", "1"}}).unbound_reason, "");
  EXPECT_THAT(shares(two_nodes(), 4, PinMode::kAuto, {{"OMP_PROC_BIND", "close"}}).unbound_reason,
              HasSubstr("OMP_PROC_BIND"));
  EXPECT_THAT(shares(two_nodes(), 4, PinMode::kOff).of_ranks, IsEmpty());
  EXPECT_EQ(shares(two_nodes(), 8, PinMode::kOn).of_ranks.size(), 8u);
  EXPECT_THROW(shares(two_nodes(), 9, PinMode::kOn), Error);
  EXPECT_THROW(parse_pin_mode("yes"), Error);
}

TEST(CoreShares, CoresAreOnTheNumaNodesOfTheRanksGpus) {
  HostCores host = two_nodes();
  host.gpu_nodes = {1, 1, 0, 0};
  const auto found = shares(host, 4);
  ASSERT_EQ(found.of_ranks.size(), 4u) << found.unbound_reason;
  EXPECT_THAT(found.of_ranks[0].cores, ElementsAre(4, 12, 5, 13));
  EXPECT_THAT(found.of_ranks[2].cores, ElementsAre(0, 8, 1, 9));
  EXPECT_EQ(found.of_ranks[1].node, 1);
  const auto chosen = shares(host, 2, PinMode::kAuto, {{"CUDA_VISIBLE_DEVICES", "3,0"}});
  ASSERT_EQ(chosen.of_ranks.size(), 2u) << chosen.unbound_reason;
  EXPECT_EQ(chosen.of_ranks[0].node, 0);
  EXPECT_EQ(chosen.of_ranks[1].node, 1);
  const auto crowded = shares(host, 2);  // both ranks' GPUs are at node 1, which has the cores for one rank
  EXPECT_THAT(crowded.of_ranks, IsEmpty());
  EXPECT_THAT(crowded.unbound_reason, HasSubstr("GPUs are at other memory nodes"));
  EXPECT_EQ(shares(host, 2, PinMode::kOn).of_ranks.size(), 2u) << "as it was asked for";
  for (const char* unknown : {"GPU-8f2c", "7", "0"}) {  // a name, a number that no GPU has, fewer GPUs than ranks
    EXPECT_EQ(shares(host, 2, PinMode::kAuto, {{"CUDA_VISIBLE_DEVICES", unknown}}).of_ranks.at(0).node, 0) << unknown;
  }
}

TEST(CoreShares, TopologyIsReadFromProcAndSys) {
  const testing::TempFolder root;
  const auto write = [&](const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text << "\n";
  };
  for (const int core : {0, 2}) {
    write("sys/devices/system/cpu/cpu" + std::to_string(core) + "/topology/core_cpus_list", "0,2");
  }
  for (const int core : {1, 3}) {
    write("sys/devices/system/cpu/cpu" + std::to_string(core) + "/topology/thread_siblings_list", "1,3");
  }
  write("sys/devices/system/node/node0/cpulist", "0,2");
  write("sys/devices/system/node/node1/cpulist", "1,3-3");
  write("proc/self/cgroup", "0::/job/step");
  write("sys/fs/cgroup/cpu.max", "max 100000");
  write("sys/fs/cgroup/job/cpu.max", "150000 100000");
  write("sys/fs/cgroup/job/step/cpu.max", "800000 100000");
  std::filesystem::create_directories(root / "proc/driver/nvidia/gpus/0000:81:00.0");
  std::filesystem::create_directories(root / "proc/driver/nvidia/gpus/0000:07:00.0");
  write("sys/bus/pci/devices/0000:81:00.0/numa_node", "1");
  write("sys/bus/pci/devices/0000:07:00.0/numa_node", "-1");
  const HostCores host = read_cores(root.path(), {0, 1, 2, 3});
  EXPECT_THAT(host.gpu_nodes, ElementsAre(-1, 1));
  ASSERT_EQ(host.allowed.size(), 4u);
  EXPECT_EQ(host.allowed[2].physical, 0);
  EXPECT_EQ(host.allowed[3].physical, 1);
  EXPECT_EQ(host.allowed[3].node, 1);
  EXPECT_DOUBLE_EQ(host.quota, 1.5);
  const HostCores bare = read_cores(root / "nothing", {4, 5});  // a container that shows neither /proc nor /sys
  EXPECT_EQ(bare.allowed[1].physical, 5);
  EXPECT_EQ(bare.quota, 0);
}

}  // namespace
}  // namespace tessera::comm
