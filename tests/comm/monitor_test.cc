// What a verdict and a device that does not end do to one rank.
#include "tessera/comm/watch/monitor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "tests/support/temp_folder.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

// A file system that does not answer until it is released, and counts who asked.
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

class SilentPeers final : public Peers {
 public:
  explicit SilentPeers(std::vector<Trouble>& heard) : heard_(heard) {}
  bool report_trouble(const Trouble& trouble) override {
    heard_.push_back(trouble);
    return false;
  }
  void report_failure(const std::string&) override {}
  bool hears_of_ends() const override { return false; }
  void leave(bool) noexcept override {}

 private:
  std::vector<Trouble>& heard_;
};

Signature call(uint64_t number) {
  return sign({.group = "world", .members = 1, .sequence = number, .op = Op::kBarrier});
}

TEST(Monitor, AVerdictBreaksOffThoughTheFileSystemHangs) {
  HungDisk disk;
  bool broken_off = false;
  {
    Monitor monitor({.trace_folder = "/nowhere", .publish = disk.publish()});
    monitor.recorder().add_group({.id = 1, .name = "world", .ranks = {0, 1}});
    monitor.on_verdict([&] { broken_off = true; });
    const uint64_t ticket = monitor.start(call(1));
    monitor.wait(ticket);
    monitor.hear({.text = "rank 1 has ended", .culprit = 1, .consequence = true});
    EXPECT_TRUE(broken_off);
    const auto verdict = monitor.fail(ticket, {.group = 1, .sequence = 1, .text = "broken"});
    ASSERT_TRUE(verdict);
    EXPECT_EQ(verdict->culprit, 1);
    const auto asked = disk.asked();
    ASSERT_EQ(asked.size(), 1U);
    EXPECT_THAT(asked[0], HasSubstr("\"state\":\"waiting\""));  // as it was before it was broken off
  }                                                             // the end does not wait for ever either
}

TEST(Monitor, ARecordIsOnDiskWhenTheMonitorIsGone) {
  const testing::TempFolder folder;
  {
    Monitor monitor({.rank = 3, .size = 4, .trace_folder = folder / "a" / "b"});
    monitor.write_record("test");
  }
  const auto records = read_flight_records(folder / "a" / "b");
  ASSERT_EQ(records.size(), 1U);
  EXPECT_EQ(records[0].rank, 3);
}

class DeviceWork final : public c10d::Work {
 public:
  bool isCompleted() override { return done; }
  bool wait(milliseconds) override { return true; }  // orders a stream only
  std::atomic<bool> done{false};
};

TEST(Monitor, ACallThatIsOnlyOrderedOnAStreamIsUnderWayUntilItHasRun) {
  Monitor monitor({.timeout = milliseconds(1)});
  std::vector<Trouble> troubles;
  monitor.attend(std::make_unique<SilentPeers>(troubles));
  const auto state = [&](size_t at) { return monitor.recorder().record("").calls.at(at).state; };
  std::vector<c10::intrusive_ptr<DeviceWork>> works;
  for (uint64_t number = 1; number <= 2; ++number) {
    works.push_back(c10::make_intrusive<DeviceWork>());
    const uint64_t ticket = monitor.start(call(number));
    monitor.carry(ticket, call(number), works.back());
    monitor.wait(ticket);
    monitor.leave_running(ticket);
  }
  EXPECT_EQ(state(0), CallState::kStarted);
  works[0]->done = true;
  monitor.tick();
  EXPECT_EQ(state(0), CallState::kFinished);
  EXPECT_EQ(state(1), CallState::kStarted);
  std::this_thread::sleep_for(milliseconds(3100));  // the timeout, and the 3 s that a back-end has to keep it itself
  monitor.tick();
  ASSERT_EQ(troubles.size(), 1U);
  EXPECT_EQ(troubles[0].sequence, 2U);
  EXPECT_TRUE(troubles[0].timed_out);
}

}  // namespace
}  // namespace tessera::comm
