// The facts about this host: cores, core masks, identity and name of the processor.
#include "tessera/base/machine/host.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <fstream>
#include <iterator>
#include <thread>

namespace tessera {
namespace {

TEST(Host, CoresFollowTheAffinityMask) {
  std::thread([] {  // affinity is per thread
    const std::string before = core_mask();
    cpu_set_t one;
    CPU_ZERO(&one);
    size_t core = 0;
    while (!((before[core / 4] >= 'a' ? before[core / 4] - 'a' + 10 : before[core / 4] - '0') >> core % 4 & 1)) ++core;
    CPU_SET(core, &one);
    ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
    EXPECT_EQ(usable_cores(), 1);
    EXPECT_EQ(core_mask(), std::string(core / 4, '0') + "1248"[core % 4]);
    EXPECT_EQ(union_of_core_masks(core_mask(), before), before);
  })
      .join();
}

TEST(Host, UnionOfCoreMasksSupportsDifferentLengths) {
  EXPECT_EQ(union_of_core_masks("1", "0008"), "1008");
  EXPECT_EQ(union_of_core_masks("0008", "1"), "1008");
  EXPECT_EQ(union_of_core_masks("c5", "3a"), "ff");
  EXPECT_EQ(count_cores(union_of_core_masks("c5", "3a")), 8);
  EXPECT_EQ(count_cores(""), 0);
}

TEST(Host, IdentitiesAreOneLine) {
  EXPECT_FALSE(host_identity().empty());
  EXPECT_EQ((host_identity() + memory_identity()).find('\n'), std::string::npos);
  EXPECT_EQ(host_identity(), host_identity());
}

TEST(Host, ProcessorModelIncludesFamilyAndModel) {
  std::ifstream cpuinfo("/proc/cpuinfo");
  std::string text(std::istreambuf_iterator<char>(cpuinfo), {});
  const std::string processor = processor_model();
  EXPECT_EQ(processor.find_first_of("\n\t"), std::string::npos) << processor;
#ifdef __x86_64__
  const auto value = [&](const std::string& key) {
    const size_t begin = text.find(": ", text.find("\n" + key + "\t")) + 2;
    return text.substr(begin, text.find('\n', begin) - begin);
  };
  EXPECT_EQ(processor, value("model name") + " (family " + value("cpu family") + ", model " + value("model") + ")");
#else
  EXPECT_FALSE(processor.empty());
#endif
}

}  // namespace
}  // namespace tessera
