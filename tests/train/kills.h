// SIGKILL at random times of training runs that save every step. Each run resumes and ends with the same bits.
#pragma once

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <thread>

#include "tests/train/tiny_run.h"

namespace tessera::train {

// A started program with all processes that it has started. The processes are found by their environment.
class Processes {
 public:
  Processes(const std::vector<std::string>& command, const std::filesystem::path& temporary,
            const std::filesystem::path& log)
      : mark_("TESSERA_TEST_KILLS=" + std::to_string(::getpid()) + "-" + std::to_string(++count_)) {
    std::vector<char*> arguments;
    for (const auto& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    root_ = ::fork();
    if (root_ != 0) return;
    const int output = ::open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    ::dup2(output, 1);
    ::dup2(output, 2);
    ::putenv(mark_.data());
    ::setenv("TMPDIR", temporary.c_str(), 1);
    ::execv(arguments[0], arguments.data());
    ::_exit(127);
  }
  ~Processes() {
    for (const auto& [pid, role] : alive()) ::kill(pid, SIGKILL);
    wait();
  }
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  // Every running process with its role: launcher, guard or rank.
  std::map<pid_t, std::string> alive() const {
    std::map<pid_t, std::string> found;
    std::error_code failed;
    for (std::filesystem::directory_iterator entry("/proc", failed), end; !failed && entry != end;
         entry.increment(failed)) {
      const pid_t pid = std::atoi(entry->path().filename().c_str());
      if (pid <= 0 || pid == ::getpid()) continue;
      std::ifstream file(entry->path() / "environ", std::ios::binary);
      const std::string environment((std::istreambuf_iterator<char>(file)), {});
      if (environment.find(mark_ + '\0') == environment.npos && !environment.ends_with(mark_)) continue;
      std::string name;
      std::getline(std::ifstream(entry->path() / "comm") >> std::ws, name);
      found[pid] = pid == root_ ? "launcher" : name == "tessera-guard" ? "guard" : "rank";
    }
    return found;
  }
  bool ended() {
    if (!code_) {
      int status = 0;
      if (::waitpid(root_, &status, WNOHANG) == root_) {
        code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      }
    }
    return code_.has_value();
  }
  // The exit code of the launcher, after all its processes have ended; -1 if a process is left after a minute.
  int wait() {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!ended() || !alive().empty()) {
      if (std::chrono::steady_clock::now() > end) return -1;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return *code_;
  }

 private:
  inline static int count_ = 0;
  std::string mark_;
  pid_t root_ = -1;
  std::optional<int> code_;
};

inline bool is_saving(const std::filesystem::path& checkpoints) {
  std::error_code failed;
  for (std::filesystem::directory_iterator entry(checkpoints, failed), end; !failed && entry != end;
       entry.increment(failed)) {
    if (entry->path().filename().string().starts_with(".step-")) return true;
  }
  return false;
}

struct KillCount {
  int kills = 0, inside_saves = 0;
  std::map<std::string, int> victims;
};

// Waits for the start of a new save, or for a random time. Returns false if the program ended first.
inline bool await_kill_time(Processes& processes, bool inside, const std::filesystem::path& checkpoints,
                            std::mt19937& random) {
  const auto start = std::chrono::steady_clock::now();
  if (!inside) {
    const auto delay = std::chrono::milliseconds(random() % 2500);
    while (std::chrono::steady_clock::now() - start < delay) {
      if (processes.ended()) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }
  for (auto saves = 1 + random() % 3; saves > 0; --saves) {
    while (is_saving(checkpoints) && saves > 1) {
      if (processes.ended()) return false;
    }
    while (!is_saving(checkpoints)) {
      if (processes.ended()) return false;
    }
  }
  std::this_thread::sleep_for(std::chrono::microseconds(random() % 4000));
  return true;
}

inline void expect_no_files_left(const TinyRun& runs, const std::string& dir, size_t most_in_checkpoints = 3) {
  namespace fs = std::filesystem;
  std::set<std::string> names, checkpoints;
  for (const auto& entry : fs::directory_iterator(runs / dir)) names.insert(entry.path().filename());
  names.erase("previous");  // metrics of a start that was killed before its first save
  names.erase("trace");     // flight records
  EXPECT_EQ(names, (std::set<std::string>{".tessera", "checkpoints", "events.jsonl", "metrics.jsonl", "model",
                                          "recipe.yaml"}));
  EXPECT_TRUE(fs::is_empty(runs / dir / ".tessera/staging"));
  for (const auto& entry : fs::directory_iterator(runs / dir / "checkpoints")) {
    const auto name = entry.path().filename().string();
    EXPECT_TRUE(name == "LATEST" || name.starts_with("step-")) << name;
    checkpoints.insert(name);
  }
  EXPECT_LE(checkpoints.size(), most_in_checkpoints);
  EXPECT_TRUE(fs::is_empty(runs / "tmp")) << *fs::directory_iterator(runs / "tmp");
}

// Starts runs of `steps` steps, kills one process of each start, and resumes until each run is complete.
inline KillCount kill_and_resume(int kills, unsigned seed, int steps) {
  std::mt19937 random(seed);
  const TinyRun runs;
  std::filesystem::create_directory(runs / "tmp");
  KillCount count;
  std::map<int, std::string> expected;  // weights by number of ranks
  const std::vector<std::string> more = {"checkpoint.every=1", "train.steps=" + std::to_string(steps)};
  for (int number = 0; count.kills < kills; ++number) {
    const int ranks = 2 + number % 2;
    if (!expected.contains(ranks)) {
      const auto dir = "undisturbed" + std::to_string(ranks);
      const auto run = runs.train(dir, ranks, more);
      EXPECT_EQ(run.exit_code, 0) << run.err;
      if (run.exit_code != 0) return count;
      expected[ranks] = runs.weights(dir);
    }
    const auto dir = "run" + std::to_string(number);
    for (bool complete = false; !complete;) {
      SCOPED_TRACE(fmt::format("seed {}, run {} on {} ranks, kill {}", seed, number, ranks, count.kills + 1));
      Processes processes(runs.command(dir, ranks, more), runs / "tmp", runs / "log");
      const bool inside = count.inside_saves * 2 <= count.kills;
      std::string victim = "nobody";
      if (count.kills < kills && await_kill_time(processes, inside, runs / dir / "checkpoints", random)) {
        const auto alive = processes.alive();
        if (!alive.empty()) {
          auto chosen = alive.begin();
          std::advance(chosen, random() % alive.size());
          const bool saving = is_saving(runs / dir / "checkpoints");
          if (::kill(chosen->first, SIGKILL) == 0) {
            victim = chosen->second;
            ++count.kills;
            ++count.victims[victim];
            count.inside_saves += saving;
          }
        }
      }
      const int code = processes.wait();
      EXPECT_NE(code, -1) << "processes are left after " << victim << " was killed";
      if (code == -1) return count;
      complete = code == 0;
      EXPECT_TRUE(complete || victim != "nobody") << "exit code " << code << ": " << read_file(runs / "log");
      if (::testing::Test::HasFailure()) return count;
    }
    const auto steps_done = runs.metrics(dir);
    EXPECT_EQ(steps_done.size(), static_cast<size_t>(steps));
    EXPECT_TRUE(runs.weights(dir) == expected[ranks]) << "seed " << seed << ", run " << number;
    expect_no_files_left(runs, dir);
    if (::testing::Test::HasFailure()) return count;
    std::filesystem::remove_all(runs / dir);
  }
  return count;
}

}  // namespace tessera::train
