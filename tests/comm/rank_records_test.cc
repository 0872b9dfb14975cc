// agree(): rank 0 computes hosts, local ranks and cores from the records that all ranks have sent.
#include "tessera/comm/rendezvous/rank_records.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"

namespace tessera::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// The fields of one rank's record: its host, local rank, and `local_size` from its launcher; `cores` is a mask in
// hexadecimal.
struct LauncherFields {
  std::string host;
  int local_rank, local_size;
  std::string cores;
  std::string address = "";
};

std::vector<RankRecord> records(const std::vector<LauncherFields>& all) {
  std::vector<RankRecord> result;
  for (const LauncherFields& one : all) {
    result.push_back({.rank = static_cast<int>(result.size()),
                      .size = static_cast<int>(all.size()),
                      .local_rank = one.local_rank,
                      .local_size = one.local_size,
                      .pid = 100 + static_cast<int>(result.size()),
                      .host_name = one.host,
                      .host = one.host,
                      .cores = one.cores,
                      .address = one.address});
  }
  return result;
}

std::string error_of(const std::vector<LauncherFields>& all) {
  try {
    agree(records(all));
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
    return error.what();
  }
  return "none";
}

TEST(Agree, SummarizesHostsWithDifferentRanksAndCores) {
  const RendezvousResult agreed = agree(records(
      {{"a", 0, 4, "3"}, {"a", 1, 4, "3"}, {"a", 2, 4, "3"}, {"a", 3, 4, "3"}, {"b", 0, 2, "ff"}, {"b", 1, 2, "ff"}}));
  EXPECT_EQ(agreed.hosts.count, 2);
  EXPECT_EQ(agreed.hosts.least_ranks, 2);
  EXPECT_FALSE(agreed.hosts.loopback);
  EXPECT_EQ(agreed.hosts.most_ranks, 4);
  EXPECT_EQ(agreed.hosts.least_cores_per_rank, 0);  // two cores for four ranks
  EXPECT_EQ(agreed.positions[0].cores_per_rank, 0);
  EXPECT_EQ(agreed.positions[5].cores_per_rank, 4);
  EXPECT_EQ(agreed.positions[5].local_rank, 1);
}

// As under srun and mpirun, each rank is bound to a core of its own.
TEST(Agree, PinnedRanksHaveOneCoreEach) {
  const RendezvousResult agreed =
      agree(records({{"a", 0, 4, "1"}, {"a", 1, 4, "2"}, {"a", 2, 4, "4"}, {"a", 3, 4, "8"}}));
  EXPECT_EQ(agreed.hosts.least_cores_per_rank, 1);
  const RendezvousResult shared =
      agree(records({{"a", 0, 4, "1"}, {"a", 1, 4, "1"}, {"a", 2, 4, "2"}, {"a", 3, 4, "2"}}));
  EXPECT_EQ(shared.hosts.least_cores_per_rank, 0);
}

TEST(Agree, LocalRanksAreComputedWhenTheLauncherGivesNone) {
  const RendezvousResult agreed = agree(records({{"a", 0, 0, "1"}, {"b", 0, 0, "1"}, {"a", 0, 0, "2"}}));
  EXPECT_EQ(agreed.hosts.count, 2);
  EXPECT_EQ(agreed.positions[2].local_rank, 1);
  EXPECT_EQ(agreed.positions[2].local_size, 2);
  EXPECT_EQ(agreed.positions[1].local_size, 1);
}

// Two launchers on one machine, as in a trial of a run on two hosts.
TEST(Agree, LaunchersOnOneMachineShareItsCores) {
  const RendezvousResult agreed = agree(records({{"a", 0, 1, "3"}, {"a", 0, 2, "3"}, {"a", 1, 2, "3"}}));
  EXPECT_EQ(agreed.hosts.count, 2);
  EXPECT_EQ(agreed.hosts.most_ranks, 2);
  EXPECT_TRUE(agreed.hosts.loopback);
  EXPECT_EQ(agreed.positions[0].cores_per_rank, 0);
}

// On the master's host the master's name leads to loopback. The ranks there cannot take the address of another host
// from this name.
TEST(Agree, RanksOnLoopbackGetTheAddressOfAnotherHost) {
  const RendezvousResult agreed = agree(records({{"a", 0, 2, "1"}, {"a", 1, 2, "2"}, {"b", 0, 1, "1", "10.0.0.2"}}));
  EXPECT_EQ(agreed.positions[0].other_host, "10.0.0.2");
  EXPECT_EQ(agreed.positions[1].other_host, "10.0.0.2");
  EXPECT_EQ(agreed.positions[2].other_host, "");
}

TEST(Agree, ErrorNamesRanksWithDifferentLocalSizes) {
  EXPECT_THAT(error_of({{"a", 0, 2, "1"}, {"a", 0, 1, "1"}}),
              AllOf(HasSubstr("rank 0 (process 100 on a) was started with all 2 ranks on its host"),
                    HasSubstr("rank 1 (process 101 on a) was started with 1 on its host")));
  EXPECT_THAT(error_of({{"a", 0, 2, "1"}, {"b", 1, 2, "1"}}),
              AllOf(HasSubstr("rank 0 (process 100 on a)"),
                    HasSubstr("rank 1 (process 101 on b) was started with all of them on another host")));
}

TEST(RankRecord, RoundTripsAndRefusesInvalidText) {
  const RankRecord one = records({{"a", 0, 1, "f0"}})[0];
  EXPECT_EQ(RankRecord::parse(one.text()).text(), one.text());
  const std::string deep(100'000, '['), negative = one.text().replace(one.text().find("\"rank\":0"), 8, "\"rank\":-1");
  for (const std::string& rubbish : {std::string(), std::string("{}"), std::string("[1]"), std::string("4\nhost"),
                                     std::string(R"({"rank": "x"})"), deep, "{\"rank\": " + deep, negative}) {
    try {
      RankRecord::parse(rubbish);
      ADD_FAILURE() << rubbish.substr(0, 60);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kComm);
      EXPECT_LT(std::string(error.what()).size(), 1000U);
    }
  }
}

}  // namespace
}  // namespace tessera::comm
