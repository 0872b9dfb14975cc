#include "tessera/base/host.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <thread>

namespace tessera {
namespace {

TEST(Host, CoresAreThoseOfTheAffinityNotOfTheMachine) {
  std::thread([] {  // affinity belongs to a thread
    const std::string before = core_mask();
    cpu_set_t one;
    CPU_ZERO(&one);
    size_t core = 0;
    while (!((before[core / 4] >= 'a' ? before[core / 4] - 'a' + 10 : before[core / 4] - '0') >> core % 4 & 1)) ++core;
    CPU_SET(core, &one);
    ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
    EXPECT_EQ(usable_cores(), 1);
    EXPECT_EQ(core_mask(), std::string(core / 4, '0') + "1248"[core % 4]);
    EXPECT_EQ(united(core_mask(), before), before);
  })
      .join();
}

TEST(Host, MasksOfUnlikeLengthAreUnited) {
  EXPECT_EQ(united("1", "0008"), "1008");
  EXPECT_EQ(united("0008", "1"), "1008");
  EXPECT_EQ(united("c5", "3a"), "ff");
  EXPECT_EQ(count_cores(united("c5", "3a")), 8);
  EXPECT_EQ(count_cores(""), 0);
}

TEST(Host, IdentitiesAreOneLine) {
  EXPECT_FALSE(host_identity().empty());
  EXPECT_EQ((host_identity() + memory_identity()).find('\n'), std::string::npos);
  EXPECT_EQ(host_identity(), host_identity());
}

}  // namespace
}  // namespace tessera
