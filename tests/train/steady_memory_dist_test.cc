// Test that a run maps no further memory after its third step.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <thread>

#include "tests/support/ranks_device.h"
#include "tests/support/sanitized.h"
#include "tests/train/kills.h"

namespace tessera::train {
namespace {

// Bytes of address space that a process has mapped: allocators, threads, files and compiled kernels.
int64_t mapped_bytes(pid_t process) {
  std::ifstream status(fmt::format("/proc/{}/status", process));
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmSize:")) return std::stoll(line.substr(7)) * 1024;
  }
  return 0;
}

struct Growth {
  size_t from_step = 0, to_step = 0;
  int64_t before = 0, after = 0;
};

// Growth of each rank between a step after the third and a step before the last ones.
std::map<pid_t, Growth> growth_of(const TinyRun& runs, const std::string& dir, int ranks, size_t steps,
                                  std::vector<std::string> more) {
  more.push_back(fmt::format("train.steps={}", steps));
  std::filesystem::create_directory(runs / "tmp");
  Processes processes(runs.command(dir, ranks, more), runs / "tmp", runs / "log");
  std::map<pid_t, Growth> found;
  while (!processes.ended()) {
    const size_t done = runs.metrics(dir).size();
    if (done >= 4 && done + 10 < steps) {
      for (const auto& [process, role] : processes.alive()) {
        const int64_t bytes = mapped_bytes(process);
        if (role != "rank" || bytes == 0) continue;
        auto& growth = found[process];
        if (growth.before == 0) growth = {.from_step = done, .before = bytes};
        growth.to_step = done;
        growth.after = bytes;
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(processes.wait(), 0) << read_file(runs / "log");
  return found;
}

TEST(SteadyMemory, NoMemoryIsMappedAfterTheThirdStep) {
  TESSERA_CPU_ONLY("is about the host's memory; tests/devices counts an accelerator's");
  if (testing::kSanitized) GTEST_SKIP() << "a sanitizer's own allocator keeps what was freed";
  const TinyRun runs;
  std::string text;  // one document, so that each step has the same number of labels
  for (int i = 0; text.size() < 200'000; ++i) text += fmt::format("{} and {} more. ", i % 97, i % 89);
  runs.write("train.txt", text);
  const std::vector<std::string> more = {fmt::format("data.train=[{}]", (runs / "train.txt").string()),
                                         "data.format=text", "checkpoint.every=0", "train.global_batch_size=4"};
  for (const std::string layout : {"parallel.dp_shard=2", "parallel.dp_replicate=2", "parallel.tp=2"}) {
    auto settings = more;
    settings.push_back(layout);
    const auto found = growth_of(runs, layout, 2, 250, settings);
    EXPECT_GE(found.size(), 2U) << layout;
    for (const auto& [process, growth] : found) {
      EXPECT_GT(growth.to_step, growth.from_step + 50) << layout << ": too few looks";
      EXPECT_EQ(growth.after, growth.before)
          << layout << ": from step " << growth.from_step << " to step " << growth.to_step;
    }
  }
}

}  // namespace
}  // namespace tessera::train
