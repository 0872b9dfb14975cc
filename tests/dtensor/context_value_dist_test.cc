// Tests that context values reach the threads to which libtorch carries a thread's state. The autograd engine carries
// the state in this way for a backward on an accelerator.
#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <gtest/gtest.h>

#include <memory>
#include <thread>

#include "tessera/dtensor/redistribute/redistribution_log.h"
#include "tessera/dtensor/rules/reductions/loss_parallel.h"
#include "tests/dtensor/support.h"

namespace tessera {
namespace {

using testing::on_ranks;

// Runs `body` on another thread with this thread's state, as the autograd engine runs the backward of another device.
void on_another_thread(const std::function<void()>& body) {
  std::exception_ptr failure;
  std::thread([&, state = at::ThreadLocalState()] {
    const at::ThreadLocalStateGuard carried(state);
    try {
      body();
    } catch (...) {
      failure = std::current_exception();
    }
  }).join();
  if (failure) std::rethrow_exception(failure);
}

TEST(ContextValue, ReachesOtherThreadsAndEndsWithItsScope) {
  std::unique_ptr<at::ThreadLocalState> kept;
  {
    const LossParallel loss;
    const ImplicitReplication replication;
    on_another_thread([] {
      EXPECT_TRUE(loss_parallel_enabled());
      EXPECT_TRUE(implicit_replication_enabled());
      const LossParallel nested;
    });
    EXPECT_TRUE(loss_parallel_enabled());
    kept = std::make_unique<at::ThreadLocalState>();
  }
  EXPECT_FALSE(loss_parallel_enabled());
  EXPECT_FALSE(implicit_replication_enabled());
  std::thread([&] {
    const at::ThreadLocalStateGuard carried(*kept);
    EXPECT_FALSE(loss_parallel_enabled());  // the scope has ended
  }).join();
}

TEST(ContextValue, ScopesMayEndInAnyOrder) {
  auto a = std::make_unique<LossParallel>();
  auto b = std::make_unique<ImplicitReplication>();
  auto c = std::make_unique<LossParallel>();
  a.reset();
  EXPECT_TRUE(loss_parallel_enabled());
  c.reset();
  EXPECT_FALSE(loss_parallel_enabled());
  EXPECT_TRUE(implicit_replication_enabled());
  b.reset();
  EXPECT_FALSE(implicit_replication_enabled());
  EXPECT_EQ(c10::ThreadLocalDebugInfo::current(), nullptr);
}

TEST(ContextValue, CollectivesAndRedistributionsOfOtherThreadsAreRecorded) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor x = distribute_tensor(at::ones({4, 4}), mesh, {Shard(0)});
    CommDebugMode seen;
    RedistributionLog log;
    on_another_thread([&] { full_tensor(x); });
    EXPECT_EQ(seen.all_gathers(), 1);
    EXPECT_EQ(log.records().size(), 1U);
    const ExplicitRedistribution only_mine;
    EXPECT_THROW(on_another_thread([&] { at::mm(x, x); }), Error);
  });
}

}  // namespace
}  // namespace tessera
