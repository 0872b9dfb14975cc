// Tests the cache of dispatch plans: look-ups by full keys, its bounded size, and the calls that hit or miss.
#include "tessera/dtensor/dispatch/plan_cache.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "tests/dtensor/support.h"
#include "tests/support/sanitized.h"

namespace tessera {
namespace {

class DispatchPlanCache : public ::testing::Test {
 protected:
  void SetUp() override { PlanCache::of_this_thread() = PlanCache(); }

  // Returns the number of misses that the calls cause.
  template <class Calls>
  uint64_t misses(Calls calls) {
    const uint64_t before = PlanCache::of_this_thread().misses;
    calls();
    return PlanCache::of_this_thread().misses - before;
  }

  at::Tensor tensor(at::IntArrayRef sizes, const Placement& placement = Shard(0)) {
    return distribute_tensor(at::ones(sizes), mesh_, {placement}, std::nullopt);
  }

  at::NoGradGuard no_grad_;
  MeshPtr mesh_ = init_device_mesh(comm::World::single(), "cpu", {1});
};

TEST(PlanCache, ComparesFullKeysNotHashes) {
  PlanCache cache;
  const auto a = std::make_shared<const Plan>();
  const auto b = std::make_shared<const Plan>();
  cache.insert(7, {1, 2, 3}, a);
  cache.insert(7, {1, 2, 4}, b);
  EXPECT_EQ(*cache.find(7, {1, 2, 3}), a);
  EXPECT_EQ(*cache.find(7, {1, 2, 4}), b);
  EXPECT_EQ(cache.find(7, {1, 2}), nullptr);
  EXPECT_EQ(cache.find(7, {1, 2, 3, 0}), nullptr);
}

TEST(PlanCache, StaysBoundedAndKeepsUsedPlans) {
  PlanCache cache;
  const auto kept = std::make_shared<const Plan>();
  cache.insert(0, {0}, kept);
  for (uint64_t i = 1; i <= 10 * PlanCache::kMaxPlans; ++i) {
    cache.insert(i, {i}, std::make_shared<const Plan>());
    ASSERT_LE(cache.size(), PlanCache::kMaxPlans);
    if (i % 1000 == 0) {
      ASSERT_NE(cache.find(0, {uint64_t{0}}), nullptr) << i;
    }
  }
  EXPECT_EQ(cache.find(1, {uint64_t{1}}), nullptr);
}

TEST(PlanCache, FindsRecentPlansWithoutTheHash) {
  PlanCache cache;
  const auto a = std::make_shared<const Plan>(), b = std::make_shared<const Plan>();
  cache.insert(7, {1, 2, 3}, a);
  EXPECT_EQ(*cache.find_recent({1, 2, 3}), a);
  EXPECT_EQ(cache.find_recent({1, 2, 4}), nullptr);
  EXPECT_EQ(cache.find_recent({1, 9, 2, 3}), nullptr);
  cache.insert(7, {1, 2, 4}, b);
  EXPECT_EQ(*cache.find_recent({1, 2, 4}), b);
  EXPECT_EQ(cache.hits, 2);
  // find_recent does not return a plan from the old half of the cache, from which the plan might be dropped. A look-up
  // by hash finds the plan and moves it to the new half.
  for (uint64_t i = 0; i < PlanCache::kMaxPlans / 2; ++i) cache.insert(i, {100, i}, a);
  EXPECT_EQ(cache.find_recent({1, 2, 4}), nullptr);
  ASSERT_NE(cache.find(7, {1, 2, 4}), nullptr);
  EXPECT_EQ(*cache.find_recent({1, 2, 4}), b);
}

TEST_F(DispatchPlanCache, RepeatedCallHits) {
  const auto x = tensor({4, 4});
  EXPECT_EQ(misses([&] { at::relu(x); }), 1);
  EXPECT_EQ(misses([&] {
              at::relu(x);
              at::relu(tensor({4, 4}));
            }),
            0);
}

TEST_F(DispatchPlanCache, EveryArgumentIsPartOfTheKey) {
  const auto x = tensor({4, 4});
  at::add(x, x, 1);
  EXPECT_EQ(misses([&] { at::add(x, x, 2); }), 1) << "alpha";
  EXPECT_EQ(misses([&] { at::add(x, x, 1.0); }), 1) << "an integer and a double are different arguments";
  EXPECT_EQ(misses([&] { at::add(tensor({5, 4}), tensor({5, 4})); }), 1) << "sizes";
  EXPECT_EQ(misses([&] { at::add(tensor({4, 4}, Shard(1)), x); }), 1) << "placements";
  EXPECT_EQ(misses([&] { at::add(tensor({4, 4}, StridedShard(0, 2)), x); }), 1) << "split factor";
  EXPECT_EQ(misses([&] { at::add(x.to(at::kDouble), x); }), 2) << "dtype, and the conversion";
  EXPECT_EQ(misses([&] { at::add(x.t(), x); }), 2) << "strides, and t";
  EXPECT_EQ(misses([&] {
              x.sum({0});
              x.sum({1});
              x.sum({0}, true);
            }),
            3)
      << "lists and flags";
  EXPECT_EQ(misses([&] {
              at::cat({x, x});
              at::cat({x, x, x});
              at::cat({x, x});
            }),
            2)
      << "length of lists";
  EXPECT_EQ(misses([&] {
              at::div(x, x, "floor");
              at::div(x, x, "trunc");
              at::div(x, x, "floor");
            }),
            2)
      << "strings";
  const auto other = init_device_mesh(mesh_->world(), "cpu", {1});
  EXPECT_EQ(misses([&] {
              at::relu(x);
              at::relu(distribute_tensor(at::ones({4, 4}), other, {Shard(0)}, std::nullopt));
            }),
            2);
}

TEST_F(DispatchPlanCache, NewShapesKeepTheSizeBounded) {
  for (int64_t rows = 1; rows <= static_cast<int64_t>(PlanCache::kMaxPlans) + 2000; ++rows) at::relu(tensor({rows, 1}));
  EXPECT_LE(PlanCache::of_this_thread().size(), PlanCache::kMaxPlans);
}

int64_t resident_bytes() {
  int64_t total = 0;
  int64_t resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

TEST_F(DispatchPlanCache, AMillionNewShapesDoNotGrowMemory) {
  if (testing::kSanitized) {
    GTEST_SKIP() << "freed memory is kept";
  }
  PlanCache& cache = PlanCache::of_this_thread();
  const auto run = [&](int64_t first, int64_t last) {
    for (int64_t rows = first; rows < last; ++rows) {
      for (int64_t columns = 1; columns <= 1000; ++columns) {
        at::neg(from_local(at::empty({rows, columns}, at::kMeta), mesh_, {Shard(0)}));
      }
    }
  };
  run(1, 41);  // both halves of the cache, and the allocator, reach their final size
  const int64_t before = resident_bytes();
  EXPECT_EQ(misses([&] { run(41, 1001); }), 960000);
  EXPECT_LE(cache.size(), PlanCache::kMaxPlans);
  EXPECT_LT(resident_bytes() - before, 4 << 20) << "a leak of five bytes a shape would show";
}

TEST_F(DispatchPlanCache, RepeatedMeshSliceHits) {
  const auto root = init_device_mesh(mesh_->world(), "cpu", {1, 1}, {"dp", "tp"});
  const auto step = [&] { at::relu(distribute_tensor(at::ones({4}), root->slice({"tp"}), {Shard(0)}, std::nullopt)); };
  EXPECT_EQ(misses(step), 1);
  EXPECT_EQ(misses(step), 0);
  EXPECT_NE(root->slice({"tp"})->id(), root->id());
}

TEST_F(DispatchPlanCache, CountsHitsAndMisses) {
  const auto x = tensor({4, 4});
  PlanCache& cache = PlanCache::of_this_thread();
  cache = PlanCache();
  for (int time = 0; time < 3; ++time) at::relu(x);
  EXPECT_EQ(cache.hits, 2);
  EXPECT_EQ(cache.misses, 1);
  EXPECT_EQ(cache.size(), 1);
}

TEST_F(DispatchPlanCache, KeepsNoMeshAlive) {
  std::weak_ptr<const DeviceMesh> gone;
  {
    const auto mesh = init_device_mesh(mesh_->world(), "cpu", {1});
    gone = mesh;
    at::relu(distribute_tensor(at::ones({4}), mesh, {Shard(0)}, std::nullopt));
  }
  EXPECT_TRUE(gone.expired());
}

}  // namespace
}  // namespace tessera
