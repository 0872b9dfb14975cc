// SIGKILL of one rank or of all ranks at random times while the ranks save continuously. Published checkpoints stay
// complete and are not lost, and no other file in the folder changes.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <map>
#include <new>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "tessera/base/files/file.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/rendezvous/thread_ranks.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tests/comm/shm_faults.h"
#include "tests/support/temp_folder.h"

namespace tessera {

namespace fs = std::filesystem;

// Shared memory of the ranks of one start and the test that forked them.
struct KilledSavesPage {
  std::atomic<int64_t> published{0};   // the last step that a rank knows to be published
  std::atomic<int64_t> kill_at_ns{0};  // monotonic clock; 0: no kill time yet

  static KilledSavesPage* map() {
    void* memory = ::mmap(nullptr, sizeof(KilledSavesPage), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? nullptr : new (memory) KilledSavesPage;
  }
};

inline int64_t monotonic_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Every element has a value that depends on the step.
inline NamedTensors state_of_step(const MeshPtr& mesh) {
  return {{"model.rows", distribute_tensor(at::zeros({301, 257}), mesh, {Shard(0)})},
          {"model.columns", distribute_tensor(at::zeros({33, 1030}), mesh, {Shard(1)})},
          {"optim.state.rows.exp_avg", distribute_tensor(at::zeros({100, 9}), mesh, {Replicate()})},
          {"optim.state.rows.step", at::zeros({})}};
}

struct KilledSavesStart {
  fs::path folder;
  int64_t after = 0;  // the step of the last published save
  bool all = false;   // true: all ranks are killed; false: one rank
  int victim = 0;
  bool defer_copy = false;
  std::chrono::microseconds delay{
      0};               // from the start of the second or third save to the kill; the first save makes a group
  bool second = false;  // true: the third save
};

// Saves until this rank is killed, or a peer's death is an error.
inline void save_until_killed(const std::shared_ptr<comm::World>& world, const KilledSavesStart& start,
                              KilledSavesPage& page) {
  if (start.all || world->rank() == start.victim) {
    std::thread([&page] {
      while (page.kill_at_ns == 0 || monotonic_ns() < page.kill_at_ns) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      ::kill(::getpid(), SIGKILL);
    }).detach();
  }
  const auto state = state_of_step(init_device_mesh(world, "cpu", {world->size()}));
  CheckpointWriter writer({.folder = start.folder, .world = world, .keep_last = 2, .defer_copy = start.defer_copy});
  for (int64_t step = start.after + 1; step < start.after + 4000; ++step) {
    if (world->rank() == 0 && step == start.after + (start.second ? 3 : 2)) {
      page.kill_at_ns = monotonic_ns() + start.delay.count() * 1000;
    }
    for (const auto& [name, tensor] : state) tensor.fill_(static_cast<double>(step));
    writer.save(step, state, {{"step", step}});
    if (step > start.after + 1) page.published = std::max<int64_t>(page.published, step - 1);
    writer.wait_for_snapshot();
  }
  throw std::runtime_error("nobody was killed");
}

// Expects that every published checkpoint is complete and has the values of its step. Returns the step that LATEST
// names, or 0 without LATEST.
inline int64_t expect_complete(const fs::path& folder) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (!fs::exists(entry.path() / "manifest.json") || entry.path().filename().string().starts_with(".")) continue;
    const auto checkpoint = Checkpoint::open(entry.path());
    checkpoint.verify();
    const NamedTensors into = {{"model.rows", at::zeros({301, 257})},
                               {"model.columns", at::zeros({33, 1030})},
                               {"optim.state.rows.exp_avg", at::zeros({100, 9})},
                               {"optim.state.rows.step", at::zeros({})}};
    checkpoint.load(into);
    EXPECT_EQ(checkpoint.extra().at("step"), checkpoint.step());
    for (const auto& [name, tensor] : into) {
      EXPECT_TRUE(tensor.eq(static_cast<double>(checkpoint.step())).all().item<bool>()) << entry.path() << " " << name;
    }
  }
  const auto latest = Checkpoint::latest(folder);
  return latest ? latest->step() : 0;
}

// The user's files, beside the checkpoints and with similar names: their content and modification times.
class UsersFiles {
 public:
  explicit UsersFiles(const fs::path& folder) {
    for (const char* name : {"notes.txt", "step-mine/weights.bin", ".step-00000001.tmp/x", "step-00000002.old/x",
                             ".hidden.0123456789abcdef.tmp"}) {
      fs::create_directories((folder / name).parent_path());
      publish_file(folder / name, std::string("of ") + name);
      before_[folder / name] = fs::last_write_time(folder / name);
    }
  }
  void expect_untouched() const {
    for (const auto& [path, time] : before_) {
      ASSERT_TRUE(fs::exists(path)) << path;
      EXPECT_TRUE(read_file(path).starts_with("of ")) << path;
      EXPECT_TRUE(fs::last_write_time(path) == time) << path;
    }
  }
  std::set<std::string> names() const {
    return {"notes.txt", "step-mine", ".step-00000001.tmp", "step-00000002.old", ".hidden.0123456789abcdef.tmp"};
  }

 private:
  std::map<fs::path, fs::file_time_type> before_;
};

struct KilledSavesCount {
  int kills = 0, inside_saves = 0, of_all = 0;
};

inline bool staged_is_left(const fs::path& folder, const std::set<std::string>& but) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    const auto name = entry.path().filename().string();
    if (name.starts_with(".") && !but.contains(name)) return true;
  }
  return false;
}

// Starts three ranks `kills` times over one folder.
inline KilledSavesCount kill_saves(int kills, unsigned seed) {
  at::set_num_threads(1);  // the ranks are forks of this process
  std::mt19937 random(seed);
  const testing::TempFolder temporary;
  const auto folder = temporary / "checkpoints";
  fs::create_directories(folder);
  const UsersFiles users(folder);
  KilledSavesCount count;
  int64_t last = 0;
  while (count.kills < kills && !::testing::Test::HasFailure()) {
    SCOPED_TRACE(fmt::format("seed {}, kill {}", seed, count.kills + 1));
    KilledSavesPage* page = KilledSavesPage::map();
    if (page == nullptr) throw std::runtime_error("mmap");
    const KilledSavesStart start{.folder = folder,
                                 .after = last,
                                 .all = random() % 2 == 0,
                                 .victim = static_cast<int>(random() % 3),
                                 .defer_copy = random() % 2 == 0,
                                 .delay = std::chrono::microseconds(random() % 60'000),
                                 .second = random() % 2 == 0};
    const auto ends = comm::testing_faults::run_forked(
        3, std::chrono::seconds(30), [&](const auto& world) { save_until_killed(world, start, *page); });
    int killed = 0;
    for (int rank = 0; rank < 3; ++rank) {
      const auto& end = ends[static_cast<size_t>(rank)];
      const bool is_victim = start.all || rank == start.victim;
      killed += end.exit_code == 137;
      EXPECT_FALSE(end.exit_code == 137 && !is_victim) << "rank " << rank;
      // When all ranks are to be killed, one rank may first fail because of another rank's death: on busy cores the
      // ranks do not die at the same time.
      EXPECT_TRUE(end.exit_code == 137 || ((start.all || !is_victim) && end.exit_code == 4))
          << "rank " << rank << ": " << end.exit_code << ", " << end.message;
    }
    EXPECT_GE(killed, 1);
    const int64_t published = page->published;
    ::munmap(page, sizeof *page);
    ++count.kills;
    count.of_all += start.all;
    count.inside_saves += staged_is_left(folder, users.names());
    const int64_t latest = expect_complete(folder);
    EXPECT_GE(latest, std::max(published, last)) << "what was published is lost";
    last = latest;
    users.expect_untouched();
  }
  // The next writer removes the files of the killed saves, and no other file.
  comm::run_thread_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
    const auto state = state_of_step(init_device_mesh(world, "cpu", {2}));
    CheckpointWriter writer({.folder = folder, .world = world, .keep_last = 2});
    for (const auto& [name, tensor] : state) tensor.fill_(static_cast<double>(last + 1));
    writer.save(last + 1, state, {{"step", last + 1}});
    writer.finish();
  });
  EXPECT_EQ(expect_complete(folder), last + 1);
  users.expect_untouched();
  auto expected = users.names();
  expected.insert("LATEST");
  size_t checkpoints = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const auto name = entry.path().filename().string();
    if (expected.contains(name)) continue;
    EXPECT_TRUE(name.starts_with("step-")) << name;
    ++checkpoints;
  }
  EXPECT_EQ(checkpoints, 2u);
  return count;
}

}  // namespace tessera
