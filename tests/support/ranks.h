// One test body that several ranks run: as threads of the test program, and as separate processes.
//
//   TESSERA_RANKS_TEST(AllReduce, SumsOverRanks, (2, 4)) {        // `world` is in scope
//     auto tensor = at::full({3}, world->rank() + 1.0);
//     comm::all_reduce(*world->group(), tensor).wait();
//     EXPECT_EQ(tensor[0].item<double>(), world->size() * (world->size() + 1) / 2);
//   }
//
// The macro makes the tests AllReduce_SumsOverRanks.Ranks/2Threads, /2Processes, /4Threads and /4Processes. A rank that
// throws or fails an ASSERT ends the other ranks. A case that exceeds its time limit fails. Process ranks start this
// program again with the filter of the current test, so code outside the bodies runs in each rank. Ranks compute on the
// CPU, or on the accelerator that TESSERA_TEST_DEVICE names (ranks_device.h).
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/rendezvous/world.h"
#include "tests/support/ranks_device.h"

namespace tessera::testing {

enum class RankMode { kThreads, kProcesses };

struct RankCase {
  int size = 1;
  RankMode mode = RankMode::kThreads;
  double limit_seconds = 60;
};

using RankBody = std::function<void(const std::shared_ptr<comm::World>&)>;

// Fails the current test if a rank fails. With mode kProcesses a test may call this at most once.
void run_ranks(const RankCase& which, const RankBody& body);

// Every size as threads, and also as processes if there is more than one rank.
std::vector<RankCase> rank_cases_of(const std::vector<int>& sizes);
template <class... Sizes>
std::vector<RankCase> rank_cases(Sizes... sizes) {
  return rank_cases_of({sizes...});
}
std::string rank_case_name(const ::testing::TestParamInfo<RankCase>& info);

class RanksTest : public ::testing::TestWithParam<RankCase> {};

}  // namespace tessera::testing

#define TESSERA_RANKS_TEST(suite, name, sizes)                                                          \
  class suite##_##name : public ::tessera::testing::RanksTest {                                         \
   protected:                                                                                           \
    static void body(const std::shared_ptr<::tessera::comm::World>& world);                             \
  };                                                                                                    \
  TEST_P(suite##_##name, Ranks) { ::tessera::testing::run_ranks(GetParam(), body); }                    \
  INSTANTIATE_TEST_SUITE_P(, suite##_##name, ::testing::ValuesIn(::tessera::testing::rank_cases sizes), \
                           ::tessera::testing::rank_case_name);                                         \
  void suite##_##name::body([[maybe_unused]] const std::shared_ptr<::tessera::comm::World>& world)
