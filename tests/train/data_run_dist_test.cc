// Data of real runs: mixtures that resume on other ranks, tokenized once, found again at the next start.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

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

TEST(DataOfRuns, AMixtureGoesOnWhereItStoppedOnAnotherNumberOfRanks) {
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
  EXPECT_THAT(other.err, HasSubstr("the data are not those of the checkpoint"));
}

TEST(DataOfRuns, OneRankTokenizesAndOthersRead) {
  const TinyRun runs;
  const auto cache = "data.cache=" + (runs / "cache").string();
  const auto kept = runs.train("kept", 3, {cache, "train.steps=2"});
  ASSERT_EQ(kept.exit_code, 0) << kept.err;
  EXPECT_EQ(count_of(kept.err, "tokenized in"), 1u) << kept.err;
  EXPECT_THAT(kept.err, Not(HasSubstr("another process tokenizes")));
  const auto off = runs.train("off", 3, {"data.cache=off", "train.steps=2"});
  ASSERT_EQ(off.exit_code, 0) << off.err;
  EXPECT_EQ(runs.weights("kept"), runs.weights("off"));
  runs.write("broken.jsonl", "{\"text\": \"a\"}\n{\"text\": 5}\n");
  const auto broken = runs.train("broken", 2, {cache, "data.train=" + (runs / "broken.jsonl").string()});
  EXPECT_EQ(broken.exit_code, 3);
  EXPECT_THAT(broken.err, HasSubstr("broken.jsonl line 2: 'text' is number"));
}

}  // namespace
}  // namespace tessera::train
