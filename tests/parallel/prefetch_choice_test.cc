#include "tessera/parallel/detail/prefetch_choice.h"

#include <gtest/gtest.h>

namespace tessera::parallel {
namespace {

RankPlace on(const char* host, int ranks_there, std::vector<int> cores) {
  return {.rank = 0, .host = host, .ranks_on_host = ranks_there, .cores = std::move(cores), .wish = std::nullopt};
}

TEST(PrefetchChoice, WantsACoreForEachRankOfEveryHost) {
  EXPECT_TRUE(has_core_for_each({on("a", 2, {0, 1}), on("a", 2, {0, 1})}));
  EXPECT_FALSE(has_core_for_each({on("a", 3, {0, 1}), on("a", 3, {0, 1}), on("a", 3, {0, 1})}));
  EXPECT_FALSE(has_core_for_each({on("a", 1, {0, 1}), on("b", 3, {0, 1}), on("b", 3, {0, 1}), on("b", 3, {0, 1})}));
  EXPECT_TRUE(has_core_for_each({on("a", 2, {0, 1}), on("a", 2, {0, 1}), on("b", 1, {0})}));
}

TEST(PrefetchChoice, CountsRanksOfTheHostThatAreInNoMeshOfTheirs) {
  EXPECT_FALSE(has_core_for_each({on("a", 4, {0, 1}), on("a", 4, {0, 1})}));
  EXPECT_FALSE(has_core_for_each({on("a", 2, {0})}));
}

TEST(PrefetchChoice, GoesByTheCoresThatRanksMayRunOn) {
  EXPECT_FALSE(has_core_for_each({on("a", 2, {0}), on("a", 2, {0})}));  // both under taskset -c 0
  EXPECT_TRUE(has_core_for_each({on("a", 2, {0}), on("a", 2, {1})}));   // bound by srun or mpirun
  EXPECT_TRUE(has_core_for_each({on("a", 4, {0}), on("a", 4, {3})}));   // the two others have their own
  EXPECT_FALSE(has_core_for_each({on("a", 3, {0}), on("a", 3, {1}), on("a", 3, {1})}));
}

}  // namespace
}  // namespace tessera::parallel
