// Monitor of one rank: failure reports, and calls on a device that do not end or that fail.
#include "tessera/comm/watch/monitor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "tessera/comm/backends/fake_backend.h"
#include "tessera/comm/collectives/collective_start.h"
#include "tessera/comm/errors/peer_failed.h"
#include "tessera/comm/group/group.h"
#include "tessera/comm/watch/watchdog.h"
#include "tests/support/temp_folder.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

// A file system that blocks every write until release(), and keeps the texts that were to be written.
class HungDisk {
 public:
  ~HungDisk() { release(); }
  RecordWriter::Publish publish() {
    return [state = state_](const std::filesystem::path&, const std::string& text) {
      std::unique_lock lock(state->mutex);
      state->asked.push_back(text);
      state->changed.notify_all();
      state->changed.wait(lock, [&] { return state->released; });
    };
  }
  void release() {
    const std::lock_guard lock(state_->mutex);
    state_->released = true;
    state_->changed.notify_all();
  }
  std::vector<std::string> asked() {
    std::unique_lock lock(state_->mutex);
    state_->changed.wait_for(lock, std::chrono::seconds(20), [&] { return !state_->asked.empty(); });
    return state_->asked;
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool released = false;
    std::vector<std::string> asked;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();  // the writer's thread may outlive a test
};

class SilentReporter final : public FailureReporter {
 public:
  explicit SilentReporter(std::vector<CallFailure>& heard) : heard_(heard) {}
  bool report_call_failure(const CallFailure& failure) override {
    heard_.push_back(failure);
    return false;
  }
  void report_rank_failure(const std::string&) override {}
  bool detects_dead_ranks() const override { return false; }
  void leave(bool) noexcept override {}

 private:
  std::vector<CallFailure>& heard_;
};

Signature call(uint64_t number) {
  return sign({.group = "world", .members = 1, .sequence = number, .op = Op::kBarrier});
}

TEST(Monitor, FailureReportAbortsGroupsWhileTheFileSystemHangs) {
  HungDisk disk;
  bool broken_off = false;
  {
    Monitor monitor({.trace_folder = "/nowhere", .publish = disk.publish()});
    monitor.recorder().add_group({.id = 1, .name = "world", .ranks = {0, 1}});
    monitor.set_abort_groups([&] { broken_off = true; });
    const uint64_t ticket = monitor.start(call(1));
    monitor.wait(ticket);
    monitor.on_failure_report({.text = "rank 1 has ended", .culprit = 1, .is_consequence = true});
    EXPECT_TRUE(broken_off);
    const auto report = monitor.fail(ticket, {.group = 1, .sequence = 1, .text = "broken"});
    ASSERT_TRUE(report);
    EXPECT_EQ(report->culprit, 1);
    const auto asked = disk.asked();
    ASSERT_EQ(asked.size(), 1U);
    EXPECT_THAT(asked[0], HasSubstr("\"state\":\"waiting\""));  // the state before the abort
  }                                                             // the destructor does not hang
}

TEST(Monitor, DestructorFinishesWritingTheRecord) {
  const testing::TempFolder folder;
  {
    Monitor monitor({.rank = 3, .size = 4, .trace_folder = folder / "a" / "b"});
    monitor.write_record("test");
  }
  const auto records = read_flight_records(folder / "a" / "b");
  ASSERT_EQ(records.size(), 1U);
  EXPECT_EQ(records[0].rank, 3);
}

// Behaves like NCCL's work object: a failed call counts as completed, and isCompleted() throws if the device is in
// error.
class DeviceWork final : public c10d::Work {
 public:
  explicit DeviceWork(bool ran = false) : done(ran) { ++alive; }
  ~DeviceWork() override { --alive; }
  bool isCompleted() override {
    TESSERA_CHECK(!in_error, ErrorKind::kInternal, "CUDA error: an illegal memory access was encountered");
    return done;
  }
  bool wait(milliseconds) override { return true; }  // only orders a stream
  void fail(const std::string& text) {
    finish(std::make_exception_ptr(std::runtime_error(text)));
    done = true;
  }
  std::atomic<bool> done, in_error{false};
  static inline std::atomic<int> alive{0};
};

using Works = std::vector<c10::intrusive_ptr<DeviceWork>>;

uint64_t begin(Monitor& monitor, uint64_t number) {
  const uint64_t ticket = monitor.start(call(number));
  monitor.before_device_start(ticket, call(number));
  return ticket;
}

// Starts and waits for call `number`, as Group does for a call on a device.
uint64_t leave_to_device(Monitor& monitor, uint64_t number, const c10::intrusive_ptr<DeviceWork>& work) {
  const uint64_t ticket = begin(monitor, number);
  monitor.after_device_start(ticket, work);
  monitor.wait(ticket);
  monitor.detach_to_device(ticket);
  return ticket;
}

CallState state_of(Monitor& monitor, uint64_t number) {
  return monitor.recorder().record("").calls.at(number - 1).state;
}

// Rank 0 of a group of two ranks. Tensors that are not on the CPU use a second back-end.
std::unique_ptr<Group> group_of_device(const std::shared_ptr<Monitor>& monitor) {
  const auto backend = [] { return make_fake_backend(0, 2, true, std::make_shared<FakeCostAccount>()); };
  monitor->recorder().add_group({.id = 1, .name = "world", .ranks = {0, 1}});
  GroupContext context;
  context.monitor = monitor;
  context.accelerator = backend();
  context.id = 1;
  context.accelerator_type = c10::DeviceType::Meta;
  return std::make_unique<Group>("world", std::vector<int>{0, 1}, 0, backend(), std::move(context));
}

template <class Begin>
PendingCollective sum_on_device(Group& group, const Begin& begin) {
  CollectiveStart call(group, Op::kAllReduce, "w");
  call.keep(at::empty({4}, at::TensorOptions().device(at::kMeta)));
  call.sign({.dtype = static_cast<int>(at::kFloat), .sizes = {4}});
  return call.start(begin);
}

template <class Failure>
std::string text_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Failure& failure) {
    return failure.what();
  }
  return "no error";
}

TEST(Monitor, CallOnAStreamStaysPendingUntilTheDeviceHasRunIt) {
  Monitor monitor({.timeout = milliseconds(1)});
  std::vector<CallFailure> reported_failures;
  monitor.set_reporter(std::make_unique<SilentReporter>(reported_failures));
  monitor.untrack(begin(monitor, 1));
  monitor.fail(begin(monitor, 2), {.group = 1, .sequence = 2, .text = "refused"});
  reported_failures.clear();
  Works works;
  for (uint64_t number = 3; number <= 4; ++number) {
    works.push_back(c10::make_intrusive<DeviceWork>());
    leave_to_device(monitor, number, works.back());
  }
  EXPECT_EQ(state_of(monitor, 3), CallState::kStarted);
  works[0]->done = true;
  monitor.tick();
  EXPECT_EQ(state_of(monitor, 3), CallState::kFinished);
  EXPECT_EQ(state_of(monitor, 4), CallState::kStarted);
  std::this_thread::sleep_for(milliseconds(3100));  // the timeout, and 3 s in which the back-end may time out itself
  monitor.tick();
  ASSERT_EQ(reported_failures.size(), 1U);
  EXPECT_EQ(reported_failures[0].sequence, 4U);
  EXPECT_TRUE(reported_failures[0].timed_out);
}

TEST(Monitor, CallThatFailsOnTheDeviceIsReported) {
  for (const bool in_error : {false, true}) {
    Monitor monitor({});
    std::vector<CallFailure> reported_failures;
    monitor.set_reporter(std::make_unique<SilentReporter>(reported_failures));
    const auto work = c10::make_intrusive<DeviceWork>();
    leave_to_device(monitor, 1, work);
    monitor.tick();
    EXPECT_EQ(reported_failures.size(), 0U);
    if (in_error) {
      work->in_error = true;
    } else {
      work->fail("NCCL error in: NCCLUtils.cpp:77, remote process exited\nncclRemoteError: ...");
    }
    monitor.tick();
    monitor.tick();
    EXPECT_EQ(state_of(monitor, 1), CallState::kFailed);
    ASSERT_EQ(reported_failures.size(), 1U);
    EXPECT_EQ(reported_failures[0].sequence, 1U);
    EXPECT_FALSE(reported_failures[0].timed_out);
    EXPECT_EQ(reported_failures[0].text,
              fmt::format("barrier (call 1 of group 'world') failed on the device: {} "
                          "(NCCL_DEBUG=WARN says more)",
                          in_error ? "CUDA error: an illegal memory access was encountered"
                                   : "NCCL error in: NCCLUtils.cpp:77, remote process exited"));
  }
}

// Without a watchdog no thread checks calls while the ranks compute.
TEST(Monitor, NextCallReportsAnEarlierFailureOnTheDevice) {
  const auto monitor = std::make_shared<Monitor>(MonitorOptions{.size = 2});
  const auto group = group_of_device(monitor);
  const auto work = c10::make_intrusive<DeviceWork>();
  const auto start = [&](c10d::Backend&) { return work; };
  sum_on_device(*group, start).wait();
  work->fail("NCCL error: remote process exited");
  EXPECT_EQ(monitor->recent_calls(1, 1).calls.at(0).state, CallState::kFailed);
  EXPECT_THAT(text_of<PeerFailed>([&] { sum_on_device(*group, start); }),
              ::testing::AllOf(HasSubstr("[comm.all_reduce] w, group 'world' (rank 0 of 2), call 2: "),
                               HasSubstr("all_reduce(sum) of float32 [4] for w (call 1 of group 'world') failed on the "
                                         "device: NCCL error: remote process exited")));
}

TEST(Monitor, WaitThrowsForACallThatFailedOnTheDevice) {
  const auto monitor = std::make_shared<Monitor>(MonitorOptions{.size = 2});
  std::vector<CallFailure> reported_failures;
  monitor->set_reporter(std::make_unique<SilentReporter>(reported_failures));
  const auto group = group_of_device(monitor);
  const auto work = c10::make_intrusive<DeviceWork>();
  PendingCollective sum = sum_on_device(*group, [&](c10d::Backend&) { return work; });
  EXPECT_EQ(state_of(*monitor, 1), CallState::kStarted);
  work->fail("NCCL error: remote process exited");
  EXPECT_THAT(text_of<PeerFailed>([&] { sum.wait(); }),
              HasSubstr("[comm.all_reduce] w, group 'world' (rank 0 of 2), call 1: NCCL error: remote process exited"));
  EXPECT_EQ(state_of(*monitor, 1), CallState::kFailed);
  EXPECT_EQ(reported_failures.size(), 1U);
  monitor->leave(true);
}

// NCCL makes a communicator at the start of a group's first call. The start blocks until all ranks of the group take
// part.
TEST(Monitor, RankMissingInABlockingStartIsNamed) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::shared_ptr<Monitor>> monitors;
  for (int rank = 0; rank < 2; ++rank) {
    monitors.push_back(std::make_shared<Monitor>(MonitorOptions{.rank = rank, .size = 2, .timeout = milliseconds(1)}));
  }
  std::atomic<bool> broken_off = false;
  monitors[0]->set_abort_groups([&] { broken_off = true; });
  const auto attend = [&](int rank) {
    monitors[rank]->set_reporter(start_watchdog(*store, {.rank = rank, .size = 2}, *monitors[rank]));
  };
  std::thread other([&] { attend(1); });
  attend(0);
  other.join();
  const auto group = group_of_device(monitors[0]);
  const auto start = [&](c10d::Backend&) -> c10::intrusive_ptr<c10d::Work> {
    EXPECT_EQ(state_of(*monitors[0], 1), CallState::kWaiting);
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!broken_off && std::chrono::steady_clock::now() < limit) std::this_thread::sleep_for(milliseconds(5));
    throw std::runtime_error("NCCL communicator was aborted");
  };
  EXPECT_THAT(text_of<Error>([&] { sum_on_device(*group, start); }),
              HasSubstr("[comm.all_reduce] w, group 'world' (rank 0 of 2), call 1: rank 1 has not made all_reduce(sum) "
                        "of float32 [4] for w (call 1 of group 'world'), in which rank 0 wait"));
  EXPECT_TRUE(broken_off);
  for (const auto& monitor : monitors) monitor->leave(true);
}

TEST(Monitor, CallRefusedAtItsStartIsNoLongerPending) {
  const auto monitor = std::make_shared<Monitor>(MonitorOptions{.size = 2});
  const auto group = group_of_device(monitor);
  const auto start = [](c10d::Backend&) -> c10::intrusive_ptr<c10d::Work> { raise(ErrorKind::kShape, "no such op"); };
  EXPECT_THAT(text_of<Error>([&] { sum_on_device(*group, start); }), HasSubstr("call 1: no such op"));
  EXPECT_EQ(state_of(*monitor, 1), CallState::kStarted);  // the call blocks no other rank
}

// The abort of a back-end may have to wait until the start of a call returns.
TEST(Monitor, FailureReportDoesNotBlockOnAnAbortThatWaitsForAStart) {
  std::atomic<bool> returned = false, broken_off = false;
  Monitor monitor({});
  monitor.set_abort_groups([&] {
    while (!returned) std::this_thread::sleep_for(milliseconds(1));
    broken_off = true;
  });
  const uint64_t ticket = begin(monitor, 1);
  monitor.on_failure_report({.text = "rank 1 has ended", .culprit = 1, .is_consequence = true});
  EXPECT_FALSE(broken_off);
  returned = true;
  monitor.fail(ticket, {.group = 1, .sequence = 1, .text = "broken"});
  monitor.leave(true);
  EXPECT_TRUE(broken_off);
}

TEST(Monitor, FinishedDeviceCallsAreReleasedWithoutAWatchdog) {
  const int before = DeviceWork::alive;
  std::string written;
  {
    Monitor monitor({.trace_folder = "/nowhere",
                     .publish = [&](const std::filesystem::path&, const std::string& text) { written = text; }});
    Works running;
    for (uint64_t number = 1; number <= 1500; ++number) {
      const auto work = c10::make_intrusive<DeviceWork>();
      leave_to_device(monitor, number, work);
      EXPECT_EQ(state_of(monitor, number), CallState::kStarted);
      if (number % 100 == 0) {
        running.push_back(work);
      } else {
        work->done = true;
      }
      ASSERT_LE(DeviceWork::alive - before, 65);
    }
    for (const auto& work : running) work->done = true;
    monitor.write_record("test");
    EXPECT_EQ(DeviceWork::alive - before, static_cast<int>(running.size()));
  }
  EXPECT_THAT(written, ::testing::Not(HasSubstr("\"state\":\"started\"")));
  EXPECT_THAT(written, HasSubstr("\"state\":\"finished\""));
}

}  // namespace
}  // namespace tessera::comm
