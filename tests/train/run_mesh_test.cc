// Tests of a run's mesh: which ranks read the same data, and the groups of each rank.
#include "tessera/train/run/run_mesh.h"

#include <gtest/gtest.h>

#include <set>

#include "tessera/comm/backends/fake_backend.h"

namespace tessera::train {
namespace {

RunMesh place_of(int rank, const RunLayout& layout) {
  const int64_t size = layout.pp * layout.dp_replicate * layout.dp_shard * layout.cp * layout.tp;
  return {layout, "cpu",
          comm::World::create_fake(rank, static_cast<int>(size), std::make_shared<comm::FakeCostAccount>())};
}

TEST(RunMesh, OnlyDataParallelCoordinatesSelectTheRows) {
  const RunLayout layout{.dp_replicate = 2, .dp_shard = 2, .tp = 2, .cp = 3, .pp = 2, .ep = 1};
  std::map<std::vector<int64_t>, std::set<int64_t>> by_place;  // key: coordinates on the dp dims
  for (int rank = 0; rank < 48; ++rank) {
    const auto place = place_of(rank, layout);
    const auto& at = *place.mesh()->coordinate();
    EXPECT_EQ(place.data_size(), 4);
    EXPECT_EQ(place.is_rank_zero(), rank == 0);
    by_place[{at[1], at[2]}].insert(place.data_rank());
    EXPECT_EQ(place.data_parallel()->dim_names(), (std::vector<std::string>{"dp_replicate", "dp_shard"}));
    EXPECT_EQ(place.is_counted(), at[4] == 0);
    EXPECT_EQ(place.pipeline()->ranks(), (std::vector<int>{rank % 24, rank % 24 + 24}));
    EXPECT_EQ(place.stage_ranks().front(), rank < 24 ? 0 : 24);
    EXPECT_EQ(place.stage_ranks().back(), rank < 24 ? 23 : 47);
    EXPECT_EQ(place.stage_ranks().size(), 24u);
  }
  std::set<int64_t> all;
  for (const auto& [place, ranks] : by_place) {
    EXPECT_EQ(ranks.size(), 1u);
    all.insert(*ranks.begin());
  }
  EXPECT_EQ(all, (std::set<int64_t>{0, 1, 2, 3}));
}

TEST(RunMesh, DataRankIsTheRankWithDataParallelOnly) {
  for (const auto& layout : {RunLayout{.dp_replicate = 1, .dp_shard = 4},
                             {.dp_replicate = 4, .dp_shard = 1},
                             {.dp_replicate = 2, .dp_shard = 2}}) {
    for (int rank = 0; rank < 4; ++rank) {
      const auto place = place_of(rank, layout);
      EXPECT_EQ(place.data_rank(), rank);
      EXPECT_TRUE(place.is_counted());
      EXPECT_EQ(place.stage_ranks().front(), 0);
      EXPECT_EQ(place.data_parallel()->ndim(), layout.dp_replicate == 1 ? 1 : 2);
    }
  }
}

}  // namespace
}  // namespace tessera::train
