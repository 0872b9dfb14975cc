// Tests of the decision for or against prefetch, from the ranks' options and the cores of their hosts.
#include "tessera/parallel/fsdp/prefetch_choice.h"

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/base/error.h"
#include "tests/support/ranks.h"

namespace tessera {
namespace {

std::vector<PrefetchVote> votes_of(std::vector<std::optional<bool>> requested, std::vector<bool> cores) {
  std::vector<PrefetchVote> votes;
  for (size_t i = 0; i < requested.size(); ++i) {
    votes.push_back({.rank = static_cast<int>(i), .requested = requested[i], .core_for_each = cores[i]});
  }
  return votes;
}

TEST(PrefetchChoice, DefaultRequiresACoreForEachRank) {
  EXPECT_TRUE(decide_prefetch(votes_of({{}, {}}, {true, true})));
  EXPECT_FALSE(decide_prefetch(votes_of({{}, {}}, {true, false})));  // ranks differ in their hosts: off
  EXPECT_FALSE(decide_prefetch(votes_of({{}, {}}, {false, false})));
}

TEST(PrefetchChoice, FollowsTheSettingOfAllRanks) {
  EXPECT_TRUE(decide_prefetch(votes_of({true, true}, {false, false})));
  EXPECT_FALSE(decide_prefetch(votes_of({false, false}, {true, true})));
  EXPECT_THROW(decide_prefetch(votes_of({true, {}}, {true, true})), Error);
  EXPECT_THROW(decide_prefetch(votes_of({true, false}, {true, true})), Error);
}

// The decision uses the values that the world agreed on at rendezvous. A rank's view of its own host is not used.
TEST(PrefetchChoice, UsesTheHostSummaryOfTheWorld) {
  for (const int scarcest : {0, 1}) {
    const comm::WorldInfo info{
        .cores_per_rank = 8,
        .hosts = {.count = 2, .least_ranks = 1, .most_ranks = 4, .least_cores_per_rank = scarcest, .loopback = true}};
    const auto world = comm::World::create(info, c10::make_intrusive<c10d::HashStore>());
    const auto mesh = init_device_mesh(world, "cpu", {1});
    EXPECT_EQ(agree_on_prefetch(*world, {mesh}, std::nullopt), scarcest == 1);
    EXPECT_EQ(agree_on_prefetch(*world, {mesh}, true), true);
  }
}

}  // namespace
}  // namespace tessera
