// Rendezvous: the launcher's environment variables are read, the ranks meet through files or TCP, and errors name the
// ranks.
#include "tessera/comm/rendezvous/rendezvous.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/machine/endpoint.h"
#include "tests/support/free_port.h"
#include "tests/support/temp_folder.h"

namespace tessera::comm {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using Variables = std::map<std::string, std::string>;

Environment variables(Variables values) {
  return [values](const char* name) -> std::optional<std::string> {
    const auto found = values.find(name);
    return found == values.end() ? std::nullopt : std::optional(found->second);
  };
}

// Returns the message of the error that `call` must throw, which must be of kind `kind`.
template <class Call>
std::string error_of(ErrorKind kind, const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

std::string config_error(const Variables& values, const RendezvousFlags& flags = {}) {
  return error_of(ErrorKind::kConfig, [&] { find_rendezvous(flags, variables(values)); });
}

TEST(NodeList, ExpandsRangesAndKeepsLeadingZeros) {
  EXPECT_THAT(expand_node_list("node[01-03,7],gpu5"), ElementsAre("node01", "node02", "node03", "node7", "gpu5"));
  EXPECT_THAT(expand_node_list("a"), ElementsAre("a"));
  EXPECT_THAT(expand_node_list("r[1-2]n[08-10]-ib"),
              ElementsAre("r1n08-ib", "r1n09-ib", "r1n10-ib", "r2n08-ib", "r2n09-ib", "r2n10-ib"));
  EXPECT_THAT(expand_node_list("c[9-10]"), ElementsAre("c9", "c10"));
}

TEST(NodeList, RefusesInvalidLists) {
  for (const char* list :
       {"", "a,", ",a", "a[", "a]", "a[1", "a[]", "a[1-]", "a[-1]", "a[2-1]", "a[[1]]", "a[x]", "a[1-99999999]",
        "a[0-999]b[0-999]", "a[0-1][0-1][0-1][0-1][0-1]", "a[1234567890]", "a[1,]"}) {
    error_of(ErrorKind::kConfig, [&] { expand_node_list(list); });
  }
}

TEST(TasksPerNode, ExpandsRepetitions) {
  EXPECT_THAT(expand_tasks_per_node("4(x2),3"), ElementsAre(4, 4, 3));
  for (const char* list : {"", "4(x2", "4(x)", "4(x0)", "x", "4(x99999999)", "-1"}) {
    error_of(ErrorKind::kConfig, [&] { expand_tasks_per_node(list); });
  }
}

TEST(Endpoint, HostAndPort) {
  EXPECT_EQ(parse_endpoint("h:1", "--master"), std::pair(std::string("h"), 1));
  EXPECT_EQ(parse_endpoint("[::1]:29500", "--master"), std::pair(std::string("::1"), 29500));
  for (const char* text : {"h", "h:", ":1", "h:0", "h:65536", "h:1x", "::1:5"}) {
    EXPECT_THAT(error_of(ErrorKind::kConfig, [&] { parse_endpoint(text, "--master"); }), HasSubstr("--master"));
  }
}

TEST(FindRendezvous, EmptyEnvironmentIsASingleRank) {
  const auto point = find_rendezvous({}, variables({}));
  EXPECT_EQ(point.info.source, "single");
  EXPECT_EQ(point.info.size, 1);
}

const Variables kTorchrun = {{"RANK", "3"},        {"WORLD_SIZE", "4"},
                             {"LOCAL_RANK", "1"},  {"LOCAL_WORLD_SIZE", "2"},
                             {"MASTER_ADDR", "h"}, {"MASTER_PORT", "29400"}};

TEST(FindRendezvous, TorchrunWithAndWithoutAgentStore) {
  Variables values = kTorchrun;
  auto point = find_rendezvous({}, variables(values));
  EXPECT_EQ(point.info.source, "torchrun");
  EXPECT_EQ(point.info.rank, 3);
  EXPECT_EQ(point.info.size, 4);
  EXPECT_EQ(point.info.local_rank, 1);
  EXPECT_EQ(point.info.local_size, 2);
  EXPECT_EQ(point.place(), "h:29400");
  values["RANK"] = "0";
  values["LOCAL_RANK"] = "0";
  EXPECT_TRUE(find_rendezvous({}, variables(values)).serve);
  values["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  EXPECT_FALSE(find_rendezvous({}, variables(values)).serve);
}

TEST(FindRendezvous, TesseraLauncherTakesPrecedenceAndFilesNeedNoPort) {
  Variables values = kTorchrun;
  values["TESSERA_RENDEZVOUS"] = "file:/x";
  values["OMPI_COMM_WORLD_SIZE"] = "9";
  const auto point = find_rendezvous({}, variables(values));
  EXPECT_EQ(point.info.source, "flags");
  EXPECT_EQ(point.folder, "/x");
  values["TORCHELASTIC_RUN_ID"] = "7";  // torchrun was started inside a rank of tessera launch
  EXPECT_EQ(find_rendezvous({}, variables(values)).info.source, "torchrun");
}

TEST(FindRendezvous, SlurmStep) {
  const Variables values = {{"SLURM_PROCID", "4"},
                            {"SLURM_STEP_NUM_TASKS", "5"},
                            {"SLURM_LOCALID", "1"},
                            {"SLURM_NODEID", "1"},
                            {"SLURM_STEP_NODELIST", "gpu[09-10]"},
                            {"SLURM_STEP_TASKS_PER_NODE", "3,2"},
                            {"SLURM_JOB_ID", "77"},
                            {"SLURM_STEP_ID", "0"}};
  const auto point = find_rendezvous({}, variables(values));
  EXPECT_EQ(point.info.source, "slurm");
  EXPECT_EQ(point.info.rank, 4);
  EXPECT_EQ(point.info.local_size, 2);
  EXPECT_EQ(point.host, "gpu09");
  EXPECT_GE(point.port, 20000);
  EXPECT_FALSE(point.serve);
  Variables other = values;
  other["SLURM_STEP_ID"] = "1";
  EXPECT_NE(find_rendezvous({}, variables(other)).port, point.port);
  other["SLURM_STEP_TASKS_PER_NODE"] = "3,3";
  EXPECT_THAT(config_error(other), HasSubstr("SLURM_STEP_TASKS_PER_NODE=3,3"));
}

TEST(FindRendezvous, SlurmBatchScriptIsASingleRank) {
  EXPECT_EQ(launcher_name(variables({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}})), "single");
}

TEST(FindRendezvous, OpenMpiAndHydra) {
  const auto open_mpi = find_rendezvous({}, variables({{"OMPI_COMM_WORLD_RANK", "1"},
                                                       {"OMPI_COMM_WORLD_SIZE", "2"},
                                                       {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                                       {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                                       {"PMIX_NAMESPACE", "123"}}));
  EXPECT_EQ(open_mpi.info.source, "mpi");
  EXPECT_EQ(open_mpi.host, "127.0.0.1");
  const auto hydra = find_rendezvous(
      {}, variables({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "5"}}));
  EXPECT_TRUE(hydra.serve);
  EXPECT_EQ(hydra.place(), "h:5");
  EXPECT_EQ(hydra.info.local_size, 0);  // the meeting will find it
  EXPECT_THAT(config_error({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}), HasSubstr("MASTER_ADDR"));
}

TEST(FindRendezvous, RunIdAndTokenComeFromTheLauncher) {
  Variables values = kTorchrun;
  EXPECT_EQ(find_rendezvous({}, variables(values)).run, "");
  values["TORCHELASTIC_RUN_ID"] = "none";  // torchrun's value for no name
  EXPECT_EQ(find_rendezvous({}, variables(values)).run, "");
  values["TORCHELASTIC_RUN_ID"] = "nightly";
  EXPECT_EQ(find_rendezvous({}, variables(values)).run, "nightly");
  values["TESSERA_RUN_ID"] = "mine";
  values["TESSERA_TOKEN"] = "secret";
  EXPECT_EQ(find_rendezvous({}, variables(values)).run, "mine");
  EXPECT_EQ(find_rendezvous({}, variables(values)).token, "secret");
}

TEST(FindRendezvous, ErrorNamesTheMissingOrInvalidVariable) {
  EXPECT_THAT(config_error({{"RANK", "0"}}), HasSubstr("WORLD_SIZE is not set"));
  EXPECT_THAT(config_error({{"WORLD_SIZE", "2"}}), HasSubstr("RANK is not set"));
  EXPECT_THAT(config_error({{"RANK", "x"}, {"WORLD_SIZE", "2"}}), HasSubstr("RANK='x'"));
  EXPECT_THAT(config_error({{"RANK", "2"}, {"WORLD_SIZE", "2"}}), HasSubstr("RANK=2 and WORLD_SIZE=2"));
  EXPECT_THAT(config_error({{"RANK", "0"}, {"WORLD_SIZE", "2"}}), HasSubstr("MASTER_ADDR is not set"));
  EXPECT_THAT(config_error({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}}), HasSubstr("MASTER_PORT"));
  EXPECT_THAT(config_error({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "2"}, {"LOCAL_WORLD_SIZE", "2"}}),
              HasSubstr("LOCAL_RANK=2, LOCAL_WORLD_SIZE=2"));
  EXPECT_THAT(config_error({{"TESSERA_RENDEZVOUS", "file:/x"}}), HasSubstr("RANK is not set"));
  EXPECT_THAT(config_error({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"TESSERA_RENDEZVOUS", "x"}}),
              HasSubstr("TESSERA_RENDEZVOUS='x'"));
  EXPECT_THAT(config_error({{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}}), HasSubstr("SLURM_LOCALID"));
}

TEST(FindRendezvous, FlagsThatContradictTheLauncherAreRefused) {
  EXPECT_THAT(config_error(kTorchrun, {.nproc = 4}), HasSubstr("--nproc 4, but torchrun started 2"));
  EXPECT_THAT(config_error({}, {.nproc = 2}), HasSubstr("tessera launch"));
  EXPECT_THAT(config_error({}, {.nnodes = 2, .node_rank = 2}), HasSubstr("--node-rank 2"));
  EXPECT_THAT(config_error({}, {.nnodes = 2, .node_rank = 1}), HasSubstr("--master"));
  const auto point = find_rendezvous({.nnodes = 2, .node_rank = 0, .master = "h:9"}, variables({}));
  EXPECT_TRUE(point.serve);
  EXPECT_EQ(point.info.size, 2);
}

RendezvousPoint file_rendezvous(const testing::TempFolder& folder, int rank, int size) {
  RendezvousPoint point;
  point.info = {.rank = rank, .size = size, .local_rank = 0, .local_size = 0, .source = "flags"};
  point.folder = folder.path().string();
  return point;
}

// Holds these meetings at the same time, each on a thread. Returns one text a meeting: its error, "" for none.
std::vector<std::string> meet_all(std::vector<RendezvousPoint>& points, std::chrono::milliseconds timeout) {
  std::vector<std::string> errors(points.size());
  std::vector<std::thread> threads;
  std::atomic<int64_t> guests = std::ranges::count_if(points, [](const RendezvousPoint& one) { return !one.serve; });
  for (size_t i = 0; i < points.size(); ++i) {
    threads.emplace_back([&, i] {
      const bool serves = points[i].serve;
      try {
        const auto store = meet(points[i], timeout);
        while (serves && guests > 0) {
          std::this_thread::sleep_for(std::chrono::milliseconds(5));  // the other ranks still read the result
        }
      } catch (const std::exception& error) {
        errors[i] = error.what();
      }
      if (!serves) --guests;
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

TEST(Meet, ComputesLocalRanks) {
  const testing::TempFolder folder;
  std::vector<RendezvousPoint> points = {file_rendezvous(folder, 0, 3), file_rendezvous(folder, 1, 3),
                                         file_rendezvous(folder, 2, 3)};
  EXPECT_THAT(meet_all(points, std::chrono::seconds(20)), ElementsAre("", "", ""));
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(points[rank].info.local_rank, rank);
    EXPECT_EQ(points[rank].info.local_size, 3);
  }
}

TEST(Meet, NamesTheRanksThatDoNotArrive) {
  const testing::TempFolder folder;
  std::vector<RendezvousPoint> points = {file_rendezvous(folder, 0, 4), file_rendezvous(folder, 2, 4)};
  const std::string wanted = "[comm.rendezvous] rank 1, 3 of 4 did not arrive within 1 s at " + folder.path().string();
  EXPECT_THAT(meet_all(points, std::chrono::seconds(1)), ElementsAre(wanted, wanted));
}

TEST(Meet, NamesRankZeroWhenItDoesNotArrive) {
  const testing::TempFolder folder;
  std::vector<RendezvousPoint> points = {file_rendezvous(folder, 1, 2)};
  EXPECT_THAT(meet_all(points, std::chrono::milliseconds(200))[0], HasSubstr("rank 0 of 2 did not arrive"));
}

TEST(Meet, DifferentWorldSizesAreReportedOnAllRanks) {
  const testing::TempFolder folder;
  std::vector<RendezvousPoint> points = {file_rendezvous(folder, 0, 4), file_rendezvous(folder, 1, 2)};
  for (const auto& error : meet_all(points, std::chrono::seconds(20))) {
    EXPECT_THAT(error, ::testing::ContainsRegex("rank 1 \\(.*\\) says the world has 2 ranks, rank 0 \\(.*\\) says 4"));
  }
}

TEST(Meet, TwoProcessesWithTheSameRankAreAnError) {
  const testing::TempFolder folder;
  std::vector<RendezvousPoint> points = {file_rendezvous(folder, 0, 2), file_rendezvous(folder, 0, 2)};
  const auto errors = meet_all(points, std::chrono::seconds(1));
  EXPECT_THAT(errors[0] + errors[1], HasSubstr("two processes say that they are rank 0 of 2"));
  EXPECT_THAT(errors[0] + errors[1], HasSubstr(": rank 0 (process "));
  EXPECT_THAT(errors[0] + errors[1], HasSubstr("), and this, rank 0 (process "));
}

// Two launchers of a run on 2 hosts, one with --nproc 2 and one with --nproc 1. The first launcher counts 4 ranks, the
// second one 2, and both have a rank 1.
TEST(Meet, DifferentNprocOfLaunchersIsAnErrorOnAllRanks) {
  const testing::TempFolder folder;
  std::vector<RendezvousPoint> points = {file_rendezvous(folder, 0, 4), file_rendezvous(folder, 1, 4),
                                         file_rendezvous(folder, 1, 2)};
  for (const auto& error : meet_all(points, std::chrono::seconds(40))) {
    EXPECT_THAT(error, ::testing::ContainsRegex("says the world has [24] ranks, .* says [24]"));
    EXPECT_THAT(error, HasSubstr("--nproc 4,2"));
  }
}

TEST(Meet, DifferentLocalSizesAreReportedOnAllRanks) {
  const testing::TempFolder folder;
  std::vector<RendezvousPoint> points = {file_rendezvous(folder, 0, 2), file_rendezvous(folder, 1, 2)};
  points[0].info.local_size = 2;
  points[1].info.local_size = 1;
  for (const auto& error : meet_all(points, std::chrono::seconds(20))) {
    EXPECT_THAT(error,
                ::testing::ContainsRegex("rank 0 .* was started with all 2 ranks on its host, but rank 1 .* with 1"));
  }
}

TEST(Meet, AllRanksHaveTheSameHostSummary) {
  const testing::TempFolder folder;
  std::vector<RendezvousPoint> points = {file_rendezvous(folder, 0, 3), file_rendezvous(folder, 1, 3),
                                         file_rendezvous(folder, 2, 3)};
  for (int rank = 0; rank < 3; ++rank) {
    points[rank].info.local_rank = rank % 2;
    points[rank].info.local_size = rank < 2 ? 2 : 1;  // as from two launchers on one machine
  }
  EXPECT_THAT(meet_all(points, std::chrono::seconds(20)), ElementsAre("", "", ""));
  for (const RendezvousPoint& point : points) {
    EXPECT_EQ(point.info.hosts.count, 2);
    EXPECT_EQ(point.info.hosts.least_ranks, 1);
    EXPECT_EQ(point.info.hosts.most_ranks, 2);
    EXPECT_EQ(point.info.hosts.least_cores_per_rank, points[0].info.cores_per_rank);
  }
}

TEST(Meet, TwoRunsAtOneEndpointAreDistinguished) {
  const testing::TempFolder folder;
  std::vector<RendezvousPoint> points = {file_rendezvous(folder, 0, 2), file_rendezvous(folder, 1, 2)};
  points[0].run = "train a.yaml";
  points[1].run = "train b.yaml";
  const auto errors = meet_all(points, std::chrono::seconds(1));
  EXPECT_THAT(errors[1],
              AllOf(HasSubstr("two runs at "), HasSubstr("rank 1 (process"), HasSubstr("of run 'train b.yaml'"),
                    HasSubstr("rank 0 (process"), HasSubstr("of run 'train a.yaml'")));
  EXPECT_THAT(errors[0], HasSubstr("rank 1 of 2 did not arrive"));  // the rank of the other run is not counted
}

TEST(Meet, RankWithAnotherTokenIsRefused) {
  const testing::TempFolder folder;
  std::vector<RendezvousPoint> points = {file_rendezvous(folder, 0, 2), file_rendezvous(folder, 1, 2)};
  points[0].token = "secret";
  points[1].token = "guess";
  const auto errors = meet_all(points, std::chrono::seconds(1));
  EXPECT_THAT(errors[1], AllOf(HasSubstr("has another TESSERA_TOKEN than this, rank 1"), Not(HasSubstr("secret"))));
  const testing::TempFolder other;
  std::vector<RendezvousPoint> same = {file_rendezvous(other, 0, 2), file_rendezvous(other, 1, 2)};
  same[0].token = same[1].token = "secret";
  EXPECT_THAT(meet_all(same, std::chrono::seconds(20)), ElementsAre("", ""));
}

RendezvousPoint tcp_rendezvous(int port, int rank, int size) {
  RendezvousPoint point;
  point.info = {.rank = rank, .size = size, .local_rank = rank, .local_size = size, .source = "torchrun"};
  point.host = "127.0.0.1";
  point.port = port;
  point.serve = rank == 0;
  return point;
}

TEST(Meet, WorksOverTcp) {
  const int port = testing::free_port();
  std::vector<RendezvousPoint> points = {tcp_rendezvous(port, 0, 2), tcp_rendezvous(port, 1, 2)};
  EXPECT_THAT(meet_all(points, std::chrono::seconds(20)), ElementsAre("", ""));
}

TEST(Meet, PortInUseIsReported) {
  const testing::TakenPort port;
  RendezvousPoint point = tcp_rendezvous(port.number(), 0, 2);
  EXPECT_EQ(
      error_of(ErrorKind::kComm, [&] { meet(point, std::chrono::seconds(1)); }),
      fmt::format(
          "[comm.rendezvous] port {} of 127.0.0.1 is in use. Choose another one: --master HOST:PORT or MASTER_PORT.",
          port.number()));
}

TEST(Meet, AddressOfAnotherHostIsRefused) {
  RendezvousPoint point = tcp_rendezvous(2000, 0, 2);
  point.host = "192.0.2.1";  // an address for documentation (RFC 5737), which no host has
  EXPECT_THAT(error_of(ErrorKind::kConfig, [&] { meet(point, std::chrono::seconds(1)); }), HasSubstr("192.0.2.1:2000"));
}

}  // namespace
}  // namespace tessera::comm
