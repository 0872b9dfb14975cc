// `tessera trace` on a folder of flight records.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/files/file.h"
#include "tessera/comm/watch/flight_recorder.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using testing::program;
using testing::run_process;
using testing::TempFolder;

// The flight record of one of two ranks. Rank 0 waits in a barrier that rank 1 has not called.
std::string record_of(int rank) {
  comm::FlightRecorder recorder(rank, 2);
  recorder.add_group({.id = 5, .name = "world", .ranks = {0, 1}});
  if (rank == 0) {
    const auto barrier = comm::sign({.group = "world", .members = 5, .sequence = 1, .op = comm::Op::kBarrier});
    recorder.mark(recorder.start(barrier), comm::CallState::kWaiting);
  }
  return to_json(recorder.record("timed out after 5 s"));
}

testing::ProcessResult trace(const std::string& folder) { return run_process({program(), "trace", folder}); }

TEST(Trace, NamesTheCulpritAndTheCallOfEachRank) {
  const TempFolder folder;
  for (const int rank : {0, 1}) publish_file(folder / comm::flight_record_name(rank), record_of(rank));
  const auto run = trace(folder.path().string());
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_TRUE(run.out.starts_with("culprit: rank 1\nfinding: rank 1 has not made barrier (call 1 of group 'world')"))
      << run.out;
  EXPECT_THAT(run.out, HasSubstr("rank 0 waits in barrier (call 1 of group 'world')"));
  EXPECT_THAT(run.out, HasSubstr("rank 1 has made no call"));
}

TEST(Trace, AMissingRecordIsAnErrorButTheOtherRecordsArePrinted) {
  const TempFolder folder;
  publish_file(folder / comm::flight_record_name(0), record_of(0));
  const auto run = trace(folder.path().string());
  EXPECT_EQ(run.exit_code, 3);
  EXPECT_THAT(run.out, HasSubstr("culprit: rank 1\n"));
  EXPECT_THAT(run.err, HasSubstr("left no record, the first of them is rank 1"));
}

TEST(Trace, BadInputIsAnErrorOfOneLine) {
  const TempFolder folder;
  EXPECT_EQ(run_process({program(), "trace"}).exit_code, 2);
  EXPECT_EQ(trace((folder / "none").string()).exit_code, 3);
  EXPECT_EQ(trace(folder.path().string()).exit_code, 3);
  const std::string whole = record_of(0);
  publish_file(folder / comm::flight_record_name(0), whole.substr(0, whole.size() / 2));
  const auto run = trace(folder.path().string());
  EXPECT_EQ(run.exit_code, 3);
  EXPECT_THAT(run.err, HasSubstr("flight-00000.json: byte "));
  EXPECT_EQ(std::ranges::count(run.err, '\n'), 1) << run.err;
}

}  // namespace
}  // namespace tessera
