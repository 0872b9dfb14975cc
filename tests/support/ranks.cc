// Runs the body of a test in several ranks, as threads or as processes (ranks.h).
#include "tests/support/ranks.h"

#include <ATen/Parallel.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "tessera/comm/rendezvous/thread_ranks.h"
#include "tests/support/process.h"
#include "tests/support/ranks_device.h"
#include "tests/support/stacks/stacks.h"
#include "tests/support/temp_folder.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

std::string current_test() {
  const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
  return std::string(info->test_suite_name()) + "." + info->name();
}

// Ends the program with the stacks of its threads when the limit is over, because a hanging collective cannot be
// interrupted from outside.
class TimeLimit {
 public:
  explicit TimeLimit(double seconds)
      : thread_([this, seconds, test = current_test()] {
          std::unique_lock lock(mutex_);
          if (over_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return done_; })) return;
          std::fprintf(stderr, "%s: ranks still running after %.0f s\n", test.c_str(), seconds);
          print_stacks(::getpid());
          std::_Exit(99);
        }) {}
  ~TimeLimit() {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
    }
    over_.notify_all();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable over_;
  bool done_ = false;
  std::thread thread_;
};

// An ASSERT only returns from the body, so an exception is thrown to end the other ranks. The error of each rank is
// printed, because the test's final error may be a consequence.
void run_body(const RankBody& body, const std::shared_ptr<comm::World>& world) {
  try {
    use_device_of_rank(world->info().local_rank);
    body(world);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d of %d: %s\n", world->rank(), world->size(), error.what());
    throw;
  }
  if (::testing::Test::HasFatalFailure()) throw std::runtime_error("a rank failed an assertion");
}

fs::path marker(const fs::path& folder, int rank) { return folder / ("rank" + std::to_string(rank) + ".passed"); }

void run_as_process_rank(const RankCase& which, const RankBody& body, int rank, const fs::path& folder) {
  const TimeLimit limit(which.limit_seconds);
  at::set_num_threads(1);
  const auto store = c10::make_intrusive<c10d::FileStore>((folder / "store").string(), which.size);
  run_body(body,
           comm::World::create(
               {.rank = rank, .size = which.size, .local_rank = rank, .local_size = which.size, .source = "flags"},
               store, {.timeout = std::chrono::seconds(60)}));
  if (!::testing::Test::HasFailure()) std::ofstream(marker(folder, rank)) << "passed\n";
}

void start_process_ranks(const RankCase& which) {
  const TempFolder folder;
  const std::string program = fs::read_symlink("/proc/self/exe").string();
  std::vector<std::string> words = {program, "--gtest_filter=" + current_test(), "--gtest_brief=1"};
  if (std::getenv("TESSERA_TEST_HOSTS")) {  // hosts/test_host.h
    words.insert(words.begin(), (fs::path(program).parent_path() / "run_test").string());
  }
  std::vector<ProcessResult> results(which.size);
  std::vector<std::thread> waiting;
  for (int rank = 0; rank < which.size; ++rank) {
    waiting.emplace_back([&, rank] {
      results[rank] = run_process(words, {.input = "",
                                          .environment = {{"TESSERA_TEST_RANK", std::to_string(rank)},
                                                          {"TESSERA_TEST_FOLDER", folder.path().string()},
                                                          {"OMP_NUM_THREADS", "1"},
                                                          {"GTEST_TOTAL_SHARDS", "1"},
                                                          {"GTEST_SHARD_INDEX", "0"},
                                                          {"GTEST_OUTPUT", ""}},
                                          .timeout_seconds = which.limit_seconds + 30});
    });
  }
  for (auto& thread : waiting) thread.join();
  for (int rank = 0; rank < which.size; ++rank) {
    EXPECT_TRUE(results[rank].exit_code == 0 && fs::exists(marker(folder.path(), rank)))
        << "rank " << rank << " of " << which.size << " ended with " << results[rank].exit_code << "\n"
        << results[rank].out << results[rank].err;
  }
}

}  // namespace

void run_ranks(const RankCase& which, const RankBody& body) {
  if (!devices_suffice(which.size)) {
    GTEST_SKIP() << "fewer devices than ranks";
  }
  if (which.mode == RankMode::kThreads) {
    const TimeLimit limit(which.limit_seconds);
    comm::run_thread_ranks(which.size, [&](const std::shared_ptr<comm::World>& world) { run_body(body, world); });
  } else if (const char* rank = std::getenv("TESSERA_TEST_RANK")) {
    run_as_process_rank(which, body, std::atoi(rank), std::getenv("TESSERA_TEST_FOLDER"));
  } else {
    start_process_ranks(which);
  }
}

std::vector<RankCase> rank_cases_of(const std::vector<int>& sizes) {
  std::vector<RankCase> cases;
  for (const int size : sizes) {
    cases.push_back({.size = size, .mode = RankMode::kThreads});
    if (size > 1) cases.push_back({.size = size, .mode = RankMode::kProcesses});
  }
  return cases;
}

std::string rank_case_name(const ::testing::TestParamInfo<RankCase>& info) {
  return std::to_string(info.param.size) + (info.param.mode == RankMode::kThreads ? "Threads" : "Processes");
}

}  // namespace tessera::testing
