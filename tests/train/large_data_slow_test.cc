// Test of a run over 2 GB of JSON lines with the real program: memory and the time of a second start do not depend on
// the size of the data.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <random>

#include "tests/train/tiny_run.h"

namespace tessera::train {
namespace {

using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

// Records of some verses each, of about a thousand bytes.
void write_records(const std::filesystem::path& path, size_t bytes) {
  const auto text = read_file(testing::asset("text") / "kjv.txt");
  std::ofstream out(path, std::ios::binary);
  std::mt19937_64 draw(7);
  for (size_t written = 0; written < bytes;) {
    const size_t from = text.find('\n', draw() % (text.size() - 3000)) + 1;
    const auto line = nlohmann::json({{"text", text.substr(from, text.find('\n', from + 900) - from)}}).dump() + "\n";
    out << line;
    written += line.size();
  }
}

struct Start {
  double seconds = 0, memory = 0;
  std::string log;
};

TEST(LargeData, SecondStartTimeAndMemoryDoNotDependOnDataSize) {
  const TinyRun runs;
  for (const char* name : {"tokenizer.json", "tokenizer_config.json"}) {
    std::filesystem::copy_file(testing::asset("smollm2") / name, runs / "base" / name,
                               std::filesystem::copy_options::overwrite_existing);
  }
  auto config = nlohmann::json::parse(read_file(runs / "base/config.json"));
  config["vocab_size"] = 49152;
  config["max_position_embeddings"] = 512;
  runs.write("base/config.json", config.dump());
  write_records(runs / "small.jsonl", 100'000);
  write_records(runs / "large.jsonl", 2'000'000'000);
  int count = 0;
  const auto start = [&](const char* data) {
    const auto dir = fmt::format("run{}", ++count);
    auto command = runs.command(dir, 1,
                                {"data.train=[" + (runs / data).string() + "]", "data.sequence_length=512",
                                 "data.cache=" + (runs / "cache").string(), "train.steps=1", "schedule.warmup_steps=0",
                                 "checkpoint.export=never"});
    const auto begin = Clock::now();
    const auto run = testing::run_process(command, {.timeout_seconds = 3000});
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    EXPECT_EQ(run.exit_code, 0) << run.err;
    if (run.exit_code != 0) return Start{};
    return Start{seconds, runs.metrics(dir).at(0)["memory_bytes"].get<double>(), run.err};
  };
  start("small.jsonl");
  const auto small = start("small.jsonl"), first = start("large.jsonl"), second = start("large.jsonl");
  EXPECT_THAT(first.log, HasSubstr("tokens, tokenized in"));
  EXPECT_THAT(second.log, HasSubstr("found tokenized"));
  std::printf("few lines: %.2f s, %.0f MB; 2 GB first: %.1f s, %.0f MB; second: %.2f s, %.0f MB\n", small.seconds,
              small.memory / 1e6, first.seconds, first.memory / 1e6, second.seconds, second.memory / 1e6);
  EXPECT_LT(second.seconds - small.seconds, 1.0) << second.log;
  EXPECT_LT(second.memory - small.memory, 300e6);
  EXPECT_LT(first.memory - small.memory, 300e6);
}

}  // namespace
}  // namespace tessera::train
