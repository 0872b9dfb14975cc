// Tests of the data of real runs: mixtures resume on other numbers of ranks, and data is tokenized once and found again
// at the next start.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <thread>

#include "tests/train/tiny_run.h"

namespace tessera::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != text.npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(RunData, MixtureResumesOnAnotherNumberOfRanks) {
  const TinyRun runs;
  runs.write("other.json", R"([{"text": "A record of another kind of file, an array."}, {"text": "And one more."}])");
  const auto mixture = fmt::format("data.train=[{{path: {}, weight: 2}}, {{path: {}, weight: 1}}]",
                                   (runs / "train.jsonl").string(), (runs / "other.json").string());
  std::vector<std::string> settings = {mixture, "data.format=auto", "data.cache=" + (runs / "cache").string(),
                                       "train.steps=6"};
  const auto whole = runs.train("whole", 1, settings);
  ASSERT_EQ(whole.exit_code, 0) << whole.err;
  EXPECT_THAT(whole.err, AllOf(HasSubstr("train.jsonl: JSON lines, texts"),
                               HasSubstr("other.json: a JSON array, texts"), HasSubstr("tokenized in")));
  settings[3] = "train.steps=2";
  const auto first = runs.train("resumed", 3, settings);
  ASSERT_EQ(first.exit_code, 0) << first.err;
  EXPECT_THAT(first.err, AllOf(HasSubstr("found tokenized"), Not(HasSubstr("tokens, tokenized in"))));
  settings[3] = "train.steps=6";
  const auto second = runs.train("resumed", 2, settings);
  ASSERT_EQ(second.exit_code, 0) << second.err;
  EXPECT_THAT(second.err, HasSubstr("after step 2"));
  expect_same_run(runs, "resumed", "whole");
  settings[0] = fmt::format("data.train=[{{path: {}, weight: 1}}, {{path: {}, weight: 1}}]",
                            (runs / "train.jsonl").string(), (runs / "other.json").string());
  const auto other = runs.train("resumed", 1, settings);
  EXPECT_EQ(other.exit_code, 2);
  EXPECT_THAT(other.err, HasSubstr("the data differ from the data of the checkpoint"));
}

TEST(RunData, OneRankTokenizesAndOthersRead) {
  const TinyRun runs;
  const auto cache = "data.cache=" + (runs / "cache").string();
  const auto kept = runs.train("kept", 3, {cache, "train.steps=2"});
  ASSERT_EQ(kept.exit_code, 0) << kept.err;
  // The rank that makes an entry prints a line, and this rank may be any rank. A rank that waits for another process
  // prints a line, too.
  EXPECT_EQ(count_of(kept.err, "tokens, tokenized in"), 1u) << kept.err;
  EXPECT_THAT(kept.err, Not(HasSubstr("another process tokenizes")));
  EXPECT_EQ(count_of(kept.err, "found tokenized"), 0u) << kept.err;
  const auto again = runs.train("again", 3, {cache, "train.steps=2"});
  EXPECT_EQ(count_of(again.err, "found tokenized"), 1u) << again.err;
  const auto off = runs.train("off", 3, {"data.cache=off", "train.steps=2"});
  ASSERT_EQ(off.exit_code, 0) << off.err;
  EXPECT_EQ(runs.weights("kept"), runs.weights("off"));
  runs.write("broken.jsonl", "{\"text\": \"a\"}\n{\"text\": 5}\n");
  const auto broken = runs.train("broken", 2, {cache, "data.train=" + (runs / "broken.jsonl").string()});
  EXPECT_EQ(broken.exit_code, 3);
  EXPECT_THAT(broken.err, HasSubstr("broken.jsonl line 2: 'text' is number"));
}

TEST(RunData, FileChangedDuringARunIsReportedOnceAndNotReread) {
  const TinyRun runs;
  const auto undisturbed = runs.train("undisturbed", 1, {"train.steps=30", "checkpoint.every=10"});
  ASSERT_EQ(undisturbed.exit_code, 0) << undisturbed.err;
  auto run = std::async(std::launch::async, [&] {
    return runs.train("disturbed", 1, {"train.steps=30", "checkpoint.every=10"});
  });
  const auto metrics = runs / "disturbed" / "metrics.jsonl";
  for (int i = 0; i < 3000 && !std::filesystem::exists(metrics); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  runs.write("train.jsonl", "{\"text\": \"something else\"}\n");
  const auto disturbed = run.get();
  ASSERT_EQ(disturbed.exit_code, 0) << disturbed.err;
  EXPECT_EQ(count_of(disturbed.err, "train.jsonl: was written to"), 1u) << disturbed.err;
  EXPECT_EQ(runs.weights("disturbed"), runs.weights("undisturbed"));
}

}  // namespace
}  // namespace tessera::train
