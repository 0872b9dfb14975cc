// Flight records: the recorder, the files of a trace folder, the diagnosis of a hang from the records of all ranks, and
// its report.
#include "tessera/comm/watch/flight_record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <numeric>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/comm/rendezvous/thread_ranks.h"
#include "tessera/comm/watch/diagnosis.h"
#include "tessera/comm/watch/flight_recorder.h"
#include "tessera/comm/watch/monitor.h"
#include "tessera/comm/watch/trace_report.h"
#include "tests/support/temp_folder.h"

namespace tessera::comm {
namespace {

using ::testing::HasSubstr;
using testing::TempFolder;

constexpr uint32_t kWorld = 11, kOther = 12;

Signature barrier_of(uint32_t group, uint64_t sequence) {
  return sign(
      {.group = group == kWorld ? "world" : "other", .members = group, .sequence = sequence, .op = Op::kBarrier});
}
Signature sum_of(uint64_t sequence, std::string_view subject = "loss") {
  static const std::vector<int64_t> sizes = {4};
  return sign({.group = "world",
               .members = kWorld,
               .sequence = sequence,
               .op = Op::kAllReduce,
               .dtype = 6,
               .sizes = sizes,
               .subject = subject});
}
Signature message(Op op, int rank, int peer) {
  return sign({.group = "world", .members = kWorld, .sequence = 1, .op = op, .root = peer, .tag = 3, .rank = rank});
}

// The record of one of three ranks in the middle of a run. All calls but the last have finished. The rank waits for the
// last call if `waits`.
FlightRecord rank_in(int rank, const std::vector<Signature>& calls, bool waits = true) {
  FlightRecorder recorder(rank, 3);
  recorder.add_group({.id = kWorld, .name = "world", .ranks = {0, 1, 2}});
  recorder.add_group({.id = kOther, .name = "other", .ranks = {0, 1, 2}});
  for (size_t i = 0; i < calls.size(); ++i) {
    const uint64_t ticket = recorder.start(calls[i]);
    recorder.mark(ticket, CallState::kWaiting);
    if (i + 1 < calls.size() || !waits) recorder.mark(ticket, CallState::kFinished);
  }
  return recorder.record("test");
}

TEST(FlightRecorder, KeepsTheLastCallsWithTimesAndState) {
  FlightRecorder recorder(1, 4, 3);
  recorder.add_group({.id = kWorld, .name = "world", .ranks = {0, 1, 2, 3}});
  std::vector<uint64_t> tickets;
  for (uint64_t sequence = 1; sequence <= 5; ++sequence) {
    tickets.push_back(recorder.start(barrier_of(kWorld, sequence)));
  }
  recorder.mark(tickets[0], CallState::kFinished);  // call 1 is no longer in the ring of 3
  recorder.mark(tickets[2], CallState::kWaiting);
  recorder.mark(tickets[2], CallState::kFinished);
  recorder.mark(tickets[4], CallState::kWaiting);
  const auto record = recorder.record("why");
  EXPECT_EQ(record.calls_made, 5U);
  ASSERT_EQ(record.calls.size(), 3U);
  EXPECT_EQ(record.calls[0].signature.sequence, 3U);
  EXPECT_EQ(record.calls[0].state, CallState::kFinished);
  EXPECT_GE(record.calls[0].finished_us, record.calls[0].started_us);
  EXPECT_EQ(record.calls[1].state, CallState::kStarted);
  EXPECT_EQ(record.calls[1].finished_us, 0);
  EXPECT_EQ(record.calls[2].state, CallState::kWaiting);
  EXPECT_LE(record.calls[2].waiting_us, record.written_us);
}

TEST(FlightRecorder, SummaryContainsTheRequestedCallAndStaysSmall) {
  FlightRecorder recorder(0, 3);
  recorder.add_group({.id = kWorld, .name = "world", .ranks = {0, 1, 2}});
  recorder.add_group({.id = kOther, .name = "other", .ranks = {0, 1, 2}});
  for (uint64_t sequence = 1; sequence <= 900; ++sequence) {
    recorder.start(sum_of(sequence));
    recorder.start(barrier_of(kOther, sequence));
  }
  const auto summary = recorder.summary(kWorld, 450);
  EXPECT_LE(summary.calls.size(), 16U);
  const auto has = [&](uint64_t sequence) {
    return std::ranges::any_of(summary.calls, [&](const FlightCall& call) {
      return call.signature.members == kWorld && call.signature.sequence == sequence;
    });
  };
  EXPECT_TRUE(has(450));
  EXPECT_TRUE(has(900));
}

TEST(FlightRecord, JsonRoundTripIsLossless) {
  const auto written = rank_in(2, {barrier_of(kWorld, 1), sum_of(2, "model.\"norm\"\n"), message(Op::kRecv, 2, 1)});
  const auto read = parse_flight_record(to_json(written), "x");
  EXPECT_EQ(to_json(read), to_json(written));
  ASSERT_EQ(read.calls.size(), 3U);
  EXPECT_EQ(read.calls[1].signature.hash, sum_of(2, "model.\"norm\"\n").hash);
  EXPECT_EQ(to_string(read.calls[2].signature), "recv(from 1, tag 3)");
}

TEST(FlightRecord, TruncatedOrChangedRecordIsAFormatError) {
  const std::string good = to_json(rank_in(1, {barrier_of(kWorld, 1), sum_of(2)}));
  const auto refused = [](const std::string& text) {
    try {
      parse_flight_record(text, "flight-00001.json");
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("flight-00001.json"));
      return error.kind() == ErrorKind::kFormat;
    }
    return false;
  };
  for (size_t length = 0; length < good.size(); length += 7) EXPECT_TRUE(refused(good.substr(0, length))) << length;
  const auto changed = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const size_t at = text.find(from);
    EXPECT_NE(at, text.npos) << from;
    return text.replace(at, from.size(), to);
  };
  EXPECT_TRUE(refused(changed("\"version\":1", "\"version\":2")));
  EXPECT_TRUE(refused(changed("\"rank\":1", "\"rank\":3")));
  EXPECT_TRUE(refused(changed("\"rank\":1", "\"rank\":\"1\"")));
  EXPECT_TRUE(refused(changed("\"world_size\":3", "\"world_size\":-1")));
  EXPECT_TRUE(refused(changed("\"op\":\"barrier\"", "\"op\":\"dance\"")));
  EXPECT_TRUE(refused(changed("\"dtype\":\"float32\"", "\"dtype\":\"float33\"")));
  EXPECT_TRUE(refused(changed("\"ranks\":[0,1,2]", "\"ranks\":[0,1,7]")));
  EXPECT_TRUE(refused(changed("\"dims\":0", "\"dims\":256")));
  EXPECT_TRUE(refused(changed("\"tag\":0", "\"tag\":4294967296")));
  EXPECT_TRUE(refused(changed("\"hash\":\"", "\"hash\":\"-")));
  EXPECT_TRUE(refused(changed("\"groups\":[", "\"groups\":[" + std::string(100'000, '['))));
  EXPECT_TRUE(refused("[]"));
}

TEST(FlightRecord, FolderMustHoldTheRecordsOfOneRun) {
  const TempFolder folder;
  const auto refused = [&](ErrorKind kind, const std::filesystem::path& path) {
    try {
      read_flight_records(path);
    } catch (const Error& error) {
      return error.kind() == kind;
    }
    return false;
  };
  EXPECT_TRUE(refused(ErrorKind::kIo, folder / "none"));
  EXPECT_TRUE(refused(ErrorKind::kFormat, folder.path()));
  publish_file(folder / flight_record_name(1), to_json(rank_in(1, {sum_of(1)})));
  publish_file(folder / flight_record_name(0), to_json(rank_in(0, {sum_of(1)})));
  const auto records = read_flight_records(folder.path());
  ASSERT_EQ(records.size(), 2U);
  EXPECT_EQ(records[0].rank, 0);
  EXPECT_EQ(explain(records).missing, std::vector<int>{2});
  publish_file(folder / flight_record_name(2), to_json(rank_in(1, {sum_of(1)})));
  EXPECT_TRUE(refused(ErrorKind::kFormat, folder.path()));  // rank 1's record under rank 2's name
  FlightRecord other = rank_in(2, {sum_of(1)});
  other.world_size = 8;
  publish_file(folder / flight_record_name(2), to_json(other));
  EXPECT_TRUE(refused(ErrorKind::kFormat, folder.path()));
}

TEST(FlightRecord, RankListsMayBeWrittenAsRanges) {
  FlightRecord record = rank_in(0, {sum_of(1)});
  record.world_size = 8000;
  std::vector<int> all(8000);
  std::iota(all.begin(), all.end(), 0);
  for (const std::vector<int>& ranks : std::vector<std::vector<int>>{
           all, {}, {7}, {3, 1}, {0, 8, 16, 24}, {5, 6, 9, 10, 11, 12, 2, 7999}, {3, 3, 3}, {0, 2, 4, 3, 2, 1}}) {
    record.groups.at(0).ranks = ranks;
    const std::string text = to_json(record, RankLists::kRuns);
    EXPECT_EQ(parse_flight_record(text, "test").groups.at(0).ranks, ranks) << text;
    EXPECT_LT(text.size(), 2000U);
  }
  record.groups[0].ranks = {0, 8, 16, 24};
  const std::string text = to_json(record, RankLists::kRuns);
  const size_t at = text.find("\"0-24:8\"");
  ASSERT_NE(at, std::string::npos) << text;
  for (const char* wrong :
       {"0-24:0", "0-8000", "8000", "-1", "0-", "0,", ",0", "0-2:", "0:2", "x", "0 1", "0-99999999999"}) {
    EXPECT_THROW(parse_flight_record(std::string(text).replace(at + 1, 6, wrong), "test"), Error) << wrong;
  }
}

TEST(FlightRecord, LatestRunOfAFolderIsRead) {
  const TempFolder folder;
  publish_file(folder / flight_record_name(0), to_json(rank_in(0, {sum_of(1)})));
  EXPECT_EQ(last_records(folder.path()), folder.path());
  std::string names[2];
  for (std::string& name : names) {
    name = new_records_name();
    std::filesystem::create_directory(folder / name);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_LT(names[0], names[1]);
  publish_file(folder / names[0] / flight_record_name(1), to_json(rank_in(1, {sum_of(1)})));
  EXPECT_EQ(last_records(folder.path()), folder / names[0]);  // the later folder has no records
  publish_file(folder / names[1] / flight_record_name(2), to_json(rank_in(2, {sum_of(1)})));
  const auto records = read_flight_records(folder.path());
  ASSERT_EQ(records.size(), 1U);
  EXPECT_EQ(records[0].rank, 2);
}

// A run must not change other contents of the folder: previous/, which an earlier version of Tessera wrote, and the
// records of other runs.
TEST(FlightRecord, RunLeavesOtherFilesOfTheFolderUnchanged) {
  const TempFolder folder;
  std::filesystem::create_directory(folder / "previous");
  publish_file(folder / "previous" / "thesis.txt", "precious");
  publish_file(folder / flight_record_name(0), "of a run that goes on");
  for (const std::string reason : {"first", "second"}) {
    run_thread_ranks(2, [&](const auto& world) { world->monitor().write_record(reason); },
                     {.trace_folder = folder.path().string()});
  }
  EXPECT_EQ(read_file(folder / "previous" / "thesis.txt"), "precious");
  EXPECT_EQ(read_file(folder / flight_record_name(0)), "of a run that goes on");
  std::vector<std::string> reasons;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    if (!entry.path().filename().string().starts_with("records-")) continue;
    for (const auto& record : read_flight_records(entry.path())) reasons.push_back(record.reason);
  }
  EXPECT_THAT(reasons, ::testing::UnorderedElementsAre("first", "first", "second", "second"));
}

TEST(Diagnosis, NamesTheFirstCallOnWhichRanksDisagree) {
  const auto found =
      diagnose({rank_in(0, {sum_of(1), sum_of(2, "a"), sum_of(3)}), rank_in(1, {sum_of(1), sum_of(2, "a"), sum_of(3)}),
                rank_in(2, {sum_of(1), sum_of(2, "b"), sum_of(3)})});
  EXPECT_EQ(found.cause, HangCause::kDisagreement);
  EXPECT_EQ(found.text,
            "the ranks disagree on call 2 of group 'world': rank 0 calls all_reduce(sum) of float32 [4] for a, rank 2 "
            "all_reduce(sum) of float32 [4] for b");
}

TEST(Diagnosis, NamesTheRankThatHasNotMadeTheCall) {
  const auto found = diagnose(
      {rank_in(0, {sum_of(1), sum_of(2)}), rank_in(1, {sum_of(1)}, false), rank_in(2, {sum_of(1), sum_of(2)})});
  EXPECT_EQ(found.cause, HangCause::kAbsent);
  EXPECT_EQ(found.culprit, 1);
  EXPECT_THAT(
      found.text,
      HasSubstr("rank 1 has not made all_reduce(sum) of float32 [4] for loss (call 2 of group 'world'), in which "
                "ranks 0, 2 wait"));
}

// Rank 0 waits for rank 1 in one group, rank 1 waits for rank 2 in another, and rank 2 waits for no rank.
TEST(Diagnosis, FollowsChainsOfWaitingRanksToTheCulprit) {
  const auto found = diagnose({rank_in(0, {sum_of(1)}), rank_in(1, {barrier_of(kOther, 1)}), rank_in(2, {}, false)});
  EXPECT_EQ(found.cause, HangCause::kAbsent);
  EXPECT_EQ(found.culprit, 2);
  EXPECT_THAT(found.text, HasSubstr("it has made no call of this group"));
}

TEST(Diagnosis, ReportsACyclicWaitAsDeadlock) {
  const auto found = diagnose({rank_in(0, {sum_of(1)}), rank_in(1, {barrier_of(kOther, 1)}), rank_in(2, {sum_of(1)})});
  EXPECT_EQ(found.cause, HangCause::kDeadlock);
  EXPECT_THAT(found.text, HasSubstr("ranks 0, 1 wait for one another"));
}

TEST(Diagnosis, RankWithoutARecordIsReportedAsSilentUnlessItExited) {
  const std::vector<FlightRecord> records = {rank_in(0, {sum_of(1)}), rank_in(1, {sum_of(1)})};
  EXPECT_EQ(diagnose(records).cause, HangCause::kSilent);
  EXPECT_EQ(diagnose(records).culprit, 2);
  EXPECT_EQ(diagnose(records, {2}).cause, HangCause::kLeft);
}

TEST(Diagnosis, ReceiverWaitsOnlyForItsSender) {
  const auto found = diagnose({rank_in(0, {sum_of(1)}, false), rank_in(1, {sum_of(1), message(Op::kRecv, 1, 2)}),
                               rank_in(2, {sum_of(1)}, false)});
  EXPECT_EQ(found.cause, HangCause::kAbsent);
  EXPECT_EQ(found.culprit, 2);
  const auto sent = diagnose({rank_in(0, {sum_of(1)}, false), rank_in(1, {sum_of(1), message(Op::kRecv, 1, 2)}),
                              rank_in(2, {sum_of(1), message(Op::kSend, 2, 1)}, false)});
  EXPECT_EQ(sent.cause, HangCause::kAllInside);
}

// A comparison of each rank with each other rank would take minutes.
TEST(Diagnosis, HandlesThousandsOfRanks) {
  constexpr int kRanks = 8000;
  FlightRecord waits = rank_in(0, {sum_of(1)}), computes = rank_in(0, {}, false);
  waits.world_size = computes.world_size = kRanks;
  std::vector<FlightRecord> records(kRanks, waits);
  for (int rank = 0; rank < kRanks; ++rank) records[rank].rank = rank;
  auto& members = records[0].groups.at(0).ranks;  // one record with all members is enough
  members.resize(kRanks);
  std::iota(members.begin(), members.end(), 0);
  EXPECT_EQ(diagnose(records).cause, HangCause::kAllInside);
  computes.rank = 4321;
  records[4321] = computes;
  const auto found = diagnose(records);
  EXPECT_EQ(found.cause, HangCause::kAbsent);
  EXPECT_EQ(found.culprit, 4321);
}

TEST(Diagnosis, ReportsNoCauseWhenNothingIsWrong) {
  EXPECT_EQ(diagnose({rank_in(0, {sum_of(1)}, false)}).cause, HangCause::kNone);
  EXPECT_EQ(diagnose({rank_in(0, {sum_of(1)}), rank_in(1, {sum_of(1)}), rank_in(2, {sum_of(1)})}).cause,
            HangCause::kAllInside);
}

TEST(TraceReport, PutsTheCulpritFirst) {
  const auto report =
      explain({rank_in(0, {sum_of(1), sum_of(2)}), rank_in(1, {sum_of(1)}, false), rank_in(2, {sum_of(1), sum_of(2)})});
  EXPECT_TRUE(report.text.starts_with("culprit: rank 1\nfinding: rank 1 has not made ")) << report.text;
  EXPECT_THAT(
      report.text,
      HasSubstr("\n  rank 2 waits in all_reduce(sum) of float32 [4] for loss (call 2 of group 'world'), begun 0.0 s"));
  EXPECT_THAT(report.text, HasSubstr("\n  rank 0, 1, 2: test\n"));
  EXPECT_TRUE(report.missing.empty());
}

}  // namespace
}  // namespace tessera::comm
