// Failures in a world without a launcher, over Gloo: every survivor must end in time with exit code 4 and a message
// with the cause.
#include "tessera/comm/errors/peer_failed.h"
#include "tessera/comm/rendezvous/thread_ranks.h"
#include "tessera/comm/watch/diagnosis.h"
#include "tessera/comm/watch/monitor.h"
#include "tests/comm/killed_ranks.h"
#include "tests/support/prompt.h"

namespace tessera::comm {
namespace {

using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

using testing::kPromptSeconds;

// Runs `body` in three ranks. Expects that all end with exit code 4 within the limit, counted from the time when all
// ranks are ready, and that every message contains all texts of `wanted`.
void expect_all_fail(const RendezvousFlags& flags, const std::vector<std::string>& wanted, const Fleet::Body& body) {
  Fleet fleet(3, flags, [&](const auto& world) {
    barrier(*world->group());
    Fleet::ready();
    body(world);
  });
  ASSERT_TRUE(fleet.await_ready());
  const double begun = clock_seconds();
  for (int rank = 0; rank < 3; ++rank) {
    const auto& end = fleet.end_of(rank);
    EXPECT_EQ(end.code, 4) << "rank " << rank << ": " << end.text;
    EXPECT_LT(end.time - begun, kPromptSeconds) << "rank " << rank;
    for (const auto& text : wanted) EXPECT_THAT(end.text, HasSubstr(text)) << "rank " << rank;
  }
}

TEST(Faults, KilledRanksAreNamedByEverySurvivor) { expect_survivors_to_notice(20, std::random_device()()); }

TEST(Faults, RanksThatComputeDetectAKilledRank) {
  Fleet fleet(3, {}, [](const auto& world) {
    barrier(*world->group());
    Fleet::ready();
    std::this_thread::sleep_for(seconds(50));
  });
  ASSERT_TRUE(fleet.await_ready());
  const double killed = clock_seconds();
  fleet.send(1, SIGKILL);
  for (const int rank : {0, 2}) {
    const auto& end = fleet.end_of(rank);
    EXPECT_EQ(end.code, 4) << end.text;
    EXPECT_LT(end.time - killed, kPromptSeconds);
    EXPECT_THAT(end.text, AllOf(HasSubstr("rank 1 has ended without an error message"),
                                HasSubstr("has made no collective since")))
        << rank;
  }
}

TEST(Faults, RankWhoseConnectionsDoNotCloseIsTerminated) {
  Fleet fleet(2, {.timeout = seconds(60)}, [](const auto& world) {
    barrier(*world->group());
    Fleet::ready();
    try {
      for (;;) barrier(*world->group());
    } catch (const PeerFailed&) {
      const auto closes = world->monitor().close();  // a group holds this while its back-end closes
      std::this_thread::sleep_for(seconds(50));
    }
  });
  ASSERT_TRUE(fleet.await_ready());
  const double killed = clock_seconds();
  fleet.send(1, SIGKILL);
  const auto& end = fleet.end_of(0);
  EXPECT_EQ(end.code, 4) << end.text;
  EXPECT_LT(end.time - killed, kPromptSeconds);
  EXPECT_THAT(end.text,
              AllOf(HasSubstr("rank 1 has ended without an error message"), HasSubstr("connections do not close")));
}

TEST(Faults, StoppedRankIsNamedInTheError) {
  Fleet fleet(3, {.timeout = seconds(60)}, [](const auto& world) {
    barrier(*world->group());
    Fleet::ready();
    for (;;) barrier(*world->group());
  });
  ASSERT_TRUE(fleet.await_ready());
  const double stopped = clock_seconds();
  fleet.send(2, SIGSTOP);
  for (const int rank : {0, 1}) {
    const auto& end = fleet.end_of(rank);
    EXPECT_EQ(end.code, 4) << end.text;
    EXPECT_LT(end.time - stopped, kPromptSeconds);
    EXPECT_THAT(end.text, HasSubstr("rank 2 has sent no message for 4 s")) << rank;
  }
}

TEST(Faults, PauseOfAllRanksIsNoFailure) {
  Fleet fleet(3, {.timeout = seconds(60)}, [](const auto& world) {
    Group& group = *world->group();
    barrier(group);
    Fleet::ready();
    const double begun = clock_seconds();
    for (bool go_on = true; go_on;) go_on = broadcast_bytes(group, clock_seconds() - begun < 7 ? "on" : "off") == "on";
  });
  ASSERT_TRUE(fleet.await_ready());
  for (int rank = 0; rank < 3; ++rank) fleet.send(rank, SIGSTOP);
  std::this_thread::sleep_for(seconds(6));
  for (int rank = 0; rank < 3; ++rank) fleet.send(rank, SIGCONT);
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(fleet.end_of(rank).code, 0) << fleet.end_of(rank).text;
}

TEST(Faults, MismatchedCallsAreRefusedBeforeDataMoves) {
  struct Case {
    const char* name;
    std::vector<std::string> wanted;
    std::function<void(Group&, bool odd)> call;
  };
  const auto floats = [](int64_t count) { return at::ones({count}); };
  const std::vector<Case> cases = {
      {"op",
       {"all_reduce(sum) of float32 [4]", "broadcast(root 0) of float32 [4]"},
       [&](Group& group, bool odd) { odd ? broadcast(group, floats(4)).wait() : all_reduce(group, floats(4)).wait(); }},
      {"size",
       {"all_reduce(sum) of float32 [4]", "all_reduce(sum) of float32 [5]"},
       [&](Group& group, bool odd) { all_reduce(group, floats(odd ? 5 : 4)).wait(); }},
      {"nothing at all",
       {"all_reduce(sum) of float32 [4]", "all_reduce(sum) of float32 [0]"},
       [&](Group& group, bool odd) { all_reduce(group, floats(odd ? 0 : 4)).wait(); }},
      {"dtype",
       {"all_reduce(sum) of float32 [4]", "all_reduce(sum) of int32 [4]"},
       [&](Group& group, bool odd) { all_reduce(group, odd ? at::ones({4}, at::kInt) : floats(4)).wait(); }},
      {"reduction",
       {"all_reduce(sum) of float32 [4]", "all_reduce(max) of float32 [4]"},
       [&](Group& group, bool odd) { all_reduce(group, floats(4), odd ? ReduceOp::kMax : ReduceOp::kSum).wait(); }},
      {"root",
       {"broadcast(root 0)", "broadcast(root 2)"},
       [&](Group& group, bool odd) { broadcast(group, floats(4), odd ? 2 : 0).wait(); }},
      {"order", {"for model.a", "for model.b"}, [&](Group& group, bool odd) {
         const at::Tensor a = floats(4), b = floats(4);
         PendingCollective first = all_reduce(group, odd ? b : a, ReduceOp::kSum, odd ? "model.b" : "model.a");
         all_reduce(group, odd ? a : b, ReduceOp::kSum, odd ? "model.a" : "model.b").wait();
       }}};
  for (const Case& one : cases) {
    SCOPED_TRACE(one.name);
    std::vector<std::string> wanted = one.wanted;
    wanted.insert(wanted.end(), {"group 'world', call 2: ", "rank 1 of the group"});
    expect_all_fail({.timeout = seconds(60), .check = "always"}, wanted,
                    [&](const auto& world) { one.call(*world->group(), world->rank() == 1); });
  }
}

TEST(Faults, AMismatchedMessageIsRefusedByItsReceiver) {
  Fleet fleet(2, {.timeout = seconds(60), .check = "always"}, [](const auto& world) {
    at::Tensor good = at::ones({4}), wrong = at::ones({5});
    if (world->rank() == 0) {
      send(*world->group(), good, 1).wait();
      send(*world->group(), good, 1).wait();
    } else {
      recv(*world->group(), good, 0).wait();
      recv(*world->group(), wrong, 0).wait();
    }
  });
  EXPECT_EQ(fleet.end_of(1).code, 4);
  EXPECT_THAT(fleet.end_of(1).text,
              AllOf(HasSubstr("send(to 1, tag 0) of float32 [4]"), HasSubstr("recv(from 0, tag 0) of float32 [5]")));
}

TEST(Faults, TimeoutErrorNamesRanksWithDifferentCalls) {
  const testing::TempFolder folder;
  expect_all_fail({.timeout = seconds(2), .trace_folder = folder.path().string()},
                  {"the ranks disagree on call 2 of group 'world'", "rank 0 calls barrier",
                   "rank 1 all_reduce(sum) of float32 [3] for odd"},
                  [](const auto& world) {
                    Group& group = *world->group();
                    if (world->rank() == 1) {
                      all_reduce(group, at::ones({3}), ReduceOp::kSum, "odd").wait();
                    } else {
                      barrier(group);
                      barrier(group);
                    }
                  });
  const auto records = read_flight_records(folder.path());
  ASSERT_EQ(records.size(), 3U);
  EXPECT_EQ(diagnose(records).cause, HangCause::kDisagreement);
}

// Rank 1 computes instead of the call. Its process is ended although it starts no collective.
TEST(Faults, RankThatSkipsACollectiveIsNamedAndTerminated) {
  const testing::TempFolder folder;
  expect_all_fail({.timeout = seconds(2), .trace_folder = folder.path().string()},
                  {"rank 1 has not made all_reduce(sum) of float32 [4] for loss (call 3 of group 'world')",
                   "ranks 0, 2 wait", "its last call of this group is barrier"},
                  [](const auto& world) {
                    Group& group = *world->group();
                    barrier(group);
                    if (world->rank() == 1) std::this_thread::sleep_for(seconds(50));
                    all_reduce(group, at::ones({4}), ReduceOp::kSum, "loss").wait();
                  });
  const Diagnosis diagnosis = diagnose(read_flight_records(folder.path()));
  EXPECT_EQ(diagnosis.cause, HangCause::kAbsent);
  EXPECT_EQ(diagnosis.culprit, 1);
}

TEST(Faults, CyclicWaitInTwoGroupsIsReportedAsDeadlock) {
  expect_all_fail({.timeout = seconds(2)}, {"wait for one another", "of group 'a'", "of group 'b'"},
                  [](const auto& world) {
                    const auto a = world->new_group({0, 1, 2}, "a"), b = world->new_group({0, 1, 2}, "b");
                    barrier(world->rank() == 1 ? *b : *a);
                    barrier(world->rank() == 1 ? *a : *b);
                  });
}

TEST(Faults, TimeoutIsAnErrorOnAllRanksWithoutSignatureCheck) {
  expect_all_fail({.timeout = seconds(2), .check = "off"}, {"timed out after 2 s"}, [](const auto& world) {
    if (world->rank() == 1) std::this_thread::sleep_for(seconds(50));
    barrier(*world->group());
  });
}

TEST(Faults, RankThatExitsWhileOthersNeedItIsNamed) {
  Fleet fleet(3, {.timeout = seconds(10)}, [](const auto& world) {
    barrier(*world->group());
    if (world->rank() == 1) return;
    barrier(*world->group());
  });
  EXPECT_EQ(fleet.end_of(1).code, 0) << fleet.end_of(1).text;
  for (const int rank : {0, 2}) {
    EXPECT_EQ(fleet.end_of(rank).code, 4);
    EXPECT_THAT(fleet.end_of(rank).text, HasSubstr("rank 1 has left the run")) << rank;
  }
}

TEST(Faults, RankWithALocalErrorIsNamedByTheOthersAtOnce) {
  Fleet fleet(3, {.timeout = seconds(60)}, [](const auto& world) {
    Group& group = *world->group();
    barrier(group);
    at::Tensor sum = at::ones({4});
    PendingCollective first = world->rank() == 2 ? all_reduce(group, sum) : PendingCollective();
    if (world->rank() == 2) raise(ErrorKind::kFormat, "[test] bad data");
    std::this_thread::sleep_for(seconds(1));
    all_reduce(group, sum).wait();
  });
  EXPECT_EQ(fleet.end_of(2).code, 3);
  for (const int rank : {0, 1}) {
    EXPECT_EQ(fleet.end_of(rank).code, 4);
    EXPECT_THAT(fleet.end_of(rank).text, HasSubstr("rank 2 failed: see the error message of that rank")) << rank;
  }
}

TEST(Faults, SignalWritesTheFlightRecordAndTheRunContinues) {
  const testing::TempFolder folder;
  Fleet fleet(2, {.timeout = seconds(60), .trace_folder = folder.path().string()}, [](const auto& world) {
    Group& group = *world->group();
    all_reduce(group, at::ones({3}), ReduceOp::kSum, "model.norm").wait();
    Fleet::ready();
    std::this_thread::sleep_for(seconds(2));
    barrier(group);
  });
  ASSERT_TRUE(fleet.await_ready());
  fleet.send(1, SIGUSR2);
  for (const int rank : {0, 1}) EXPECT_EQ(fleet.end_of(rank).code, 0) << fleet.end_of(rank).text;
  const auto records = read_flight_records(folder.path());
  ASSERT_EQ(records.size(), 1U);
  EXPECT_EQ(records[0].rank, 1);
  EXPECT_EQ(records[0].reason, "SIGUSR2");
  ASSERT_EQ(records[0].calls.size(), 1U);
  EXPECT_EQ(to_string(records[0].calls[0].signature), "all_reduce(sum) of float32 [3] for model.norm");
  EXPECT_EQ(records[0].calls[0].state, CallState::kFinished);
}

TEST(Faults, TimeoutErrorNamesThreadRankThatSkipsACollective) {
  try {
    run_thread_ranks(2,
                     [](const auto& world) {
                       at::Tensor sum = at::ones({4});
                       barrier(*world->group());
                       if (world->rank() == 0) all_reduce(*world->group(), sum).wait();
                     },
                     {.timeout = seconds(2)});
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kComm);
    EXPECT_THAT(error.what(),
                HasSubstr("rank 1 has not made all_reduce(sum) of float32 [4] (call 2 of group 'world')"));
  }
}

}  // namespace
}  // namespace tessera::comm
