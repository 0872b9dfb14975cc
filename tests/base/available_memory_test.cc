// The memory that control groups (cgroups) of both versions leave a process. The tests read folders that look like
// /proc and /sys.
#include "tessera/base/machine/available_memory.h"

#include <gtest/gtest.h>

#include "tessera/base/files/file.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

class Machine {
 public:
  Machine() { put("proc/meminfo", "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:   12582912 kB\n"); }
  void put(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories((folder_ / path).parent_path());
    publish_file(folder_ / path, text);
  }
  void mount(const std::string& lines, const std::string& groups) const {
    put("proc/self/mountinfo", "22 1 0:20 / /proc rw - proc proc rw\n" + lines);
    put("proc/self/cgroup", groups);
  }
  AvailableMemory read() const { return read_available_memory(folder_.path()); }

 private:
  testing::TempFolder folder_;
};

const std::string kVersion2Mount = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";

TEST(AvailableMemory, WithoutCgroupsIsTheMachinesMemory) {
  const Machine machine;
  const auto room = machine.read();
  EXPECT_EQ(room.machine_bytes, 16 * kGiB);
  EXPECT_EQ(room.limit_bytes, std::nullopt);
  EXPECT_EQ(room.total_bytes(), 16 * kGiB);
  EXPECT_EQ(room.available_bytes(), 12 * kGiB);
}

TEST(AvailableMemory, SmallestLimitOfACgroupAndItsParentsApplies) {
  const Machine machine;
  machine.mount(kVersion2Mount, "0::/kubepods.slice/pod/box\n");
  const std::string pod = "sys/fs/cgroup/kubepods.slice/pod/";
  machine.put(pod + "box/memory.max", "max\n");
  EXPECT_EQ(machine.read().limit_bytes, std::nullopt) << "\"max\" is no limit";
  machine.put(pod + "memory.max", std::to_string(3 * kGiB) + "\n");
  machine.put(pod + "memory.current", std::to_string(2 * kGiB) + "\n");
  machine.put(pod + "memory.stat", "anon 5\nfile 1610612736\nfile_mapped 536870912\nshmem 536870912\n");
  EXPECT_EQ(machine.read().total_bytes(), 3 * kGiB);
  EXPECT_EQ(machine.read().available_bytes(), kGiB + kGiB / 2) << "half a GiB of file cache can be dropped";
  machine.put(pod + "box/memory.max", std::to_string(5 * kGiB) + "\n");
  EXPECT_EQ(machine.read().total_bytes(), 3 * kGiB) << "the parent's";
  machine.put("sys/fs/cgroup/kubepods.slice/memory.max", std::to_string(2 * kGiB) + "\n");
  EXPECT_EQ(machine.read().total_bytes(), 2 * kGiB) << "its parent's";
  EXPECT_EQ(machine.read().available_bytes(), kGiB + kGiB / 2) << "what is left is the pod's";
  machine.put("sys/fs/cgroup/kubepods.slice/memory.max", std::to_string(64 * kGiB) + "\n");
  EXPECT_EQ(machine.read().limit_bytes, 3 * kGiB) << "a limit beyond the machine's memory is none";
}

TEST(AvailableMemory, CgroupAtTheMountPointOfAContainerLimitsIt) {
  const Machine machine;
  for (const char* group : {"0::/\n", "0::/docker/1234\n", "0::/../..\n"}) {
    machine.mount(kVersion2Mount, group);
    machine.put("sys/fs/cgroup/memory.max", std::to_string(kGiB) + "\n");
    EXPECT_EQ(machine.read().limit_bytes, kGiB) << group;
  }
}

TEST(AvailableMemory, CgroupV1IsReadAtTheMountPointOfItsController) {
  const Machine machine;
  const std::string mounts =
      "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
      "35 31 0:32 / /sys/fs/cgroup/memory\\040one rw,relatime shared:1 - cgroup cgroup rw,memory\n"
      "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
  machine.mount(mounts, "5:cpu:/job\n4:hugetlb,memory:/slurm/job\n0::/\n");
  const std::string slurm = "sys/fs/cgroup/memory one/slurm/";
  machine.put(slurm + "job/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(machine.read().limit_bytes, std::nullopt);
  machine.put(slurm + "memory.limit_in_bytes", std::to_string(4 * kGiB) + "\n");
  machine.put(slurm + "memory.usage_in_bytes", std::to_string(3 * kGiB) + "\n");
  machine.put(slurm + "memory.stat", "cache 7\ntotal_cache 1073741824\ntotal_mapped_file 0\ntotal_shmem 0\n");
  EXPECT_EQ(machine.read().total_bytes(), 4 * kGiB);
  EXPECT_EQ(machine.read().available_bytes(), 2 * kGiB);
  // Docker without a cgroup namespace: the mount shows the container's own group.
  machine.mount("35 31 0:32 /docker/12 /sys/fs/cgroup/own rw - cgroup cgroup rw,memory\n", "4:memory:/docker/12\n");
  machine.put("sys/fs/cgroup/own/memory.limit_in_bytes", std::to_string(kGiB) + "\n");
  EXPECT_EQ(machine.read().total_bytes(), kGiB);
  machine.mount("35 31 0:32 /docker/12 /sys/fs/cgroup/own rw - cgroup cgroup rw,memory\n", "4:memory:/docker/123\n");
  EXPECT_EQ(machine.read().total_bytes(), kGiB) << "another group of a name that begins so";
}

TEST(AvailableMemory, ReadsThisMachinesMemory) {
  const auto room = read_available_memory();
  EXPECT_GT(room.total_bytes(), int64_t{1} << 28);
  EXPECT_GT(room.available_bytes(), 0);
  EXPECT_LE(room.available_bytes(), room.total_bytes());
}

}  // namespace
}  // namespace tessera
