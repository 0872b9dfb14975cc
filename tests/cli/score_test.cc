// `tessera score` as a user runs it, with a tiny random model. Expected log-probs come from the model's logits.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>

#include "tessera/base/files/file.h"
#include "tests/cli/tiny_tokenizer.h"
#include "tests/models/tiny.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

class Score : public ::testing::Test {
 protected:
  void SetUp() override {
    model_ = testing::tiny_model();
    save_pretrained(*model_, dir(), {});
    publish_file(dir() / "tokenizer.json", testing::character_tokenizer("abcdefghijklmnopqrstuvwxyz "));
  }
  std::filesystem::path dir() const { return folder_ / "model"; }
  testing::ProcessResult run(const std::string& input, std::vector<std::string> more = {}) const {
    publish_file(folder_ / "in.jsonl", input);
    std::vector<std::string> all = {testing::program(), "score",   "--model",
                                    dir().string(),     "--input", (folder_ / "in.jsonl").string()};
    all.insert(all.end(), more.begin(), more.end());
    return testing::run_process(all, {.input = input});
  }
  // Log-probs of the tokens of `text`, starting with token `first`, from the model's own logits.
  std::vector<double> expected(const std::string& text, size_t first) const {
    const at::NoGradGuard no_grad;
    std::vector<int64_t> ids;
    for (const char each : text) ids.push_back(each == ' ' ? 26 : each - 'a');
    const auto logprobs = model_->logits({.tokens = at::tensor(ids).unsqueeze(0)})[0].log_softmax(-1);
    std::vector<double> found;
    for (size_t i = first; i < ids.size(); ++i) {
      found.push_back(logprobs[static_cast<int64_t>(i) - 1][ids[i]].item<double>());
    }
    return found;
  }

  testing::TempFolder folder_;
  std::shared_ptr<CausalLM> model_;
};

std::vector<json> lines_of(const std::string& text) {
  std::vector<json> found;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) found.push_back(json::parse(line));
  return found;
}

void expect_logprobs(const json& found, const std::vector<double>& wanted) {
  ASSERT_EQ(found["logprobs"].size(), wanted.size());
  ASSERT_EQ(found["tokens"].size(), wanted.size());
  double sum = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_NEAR(found["logprobs"][i].get<double>(), wanted[i], 1e-5) << i;
    sum += wanted[i];
  }
  EXPECT_NEAR(found["sum"].get<double>(), sum, 1e-4);
  EXPECT_NEAR(found["perplexity"].get<double>() / std::exp(-sum / static_cast<double>(wanted.size())), 1, 1e-5);
}

const char* const kRecords = R"({"id": "x", "text": "the cat sat on a mat"})"
                             "\n\n"
                             R"({"id": [1, {"k": null}], "prompt": "the", "completion": " dog", "more": 1})"
                             "\n"
                             R"({"prompt": "ab", "choices": ["cde", "zzzzzz", "q"], "answer": 2})"
                             "\n"
                             R"({"id": 4, "text": "a"})"
                             "\n"
                             R"({"id": 5, "prompt": "", "completion": "abc"})"
                             "\n"
                             R"({"id": 6, "prompt": "abc", "completion": ""})";

TEST_F(Score, WritesTheLogProbsOfTheModelInInputOrder) {
  const auto result = run(kRecords);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto found = lines_of(result.out);
  ASSERT_EQ(found.size(), 6u);
  EXPECT_EQ(found[0]["id"], "x");
  expect_logprobs(found[0], expected("the cat sat on a mat", 1));
  EXPECT_EQ(found[1]["id"], json::parse(R"([1, {"k": null}])"));
  expect_logprobs(found[1], expected("the dog", 3));
  EXPECT_EQ(found[1]["tokens"], (std::vector<int>{26, 3, 14, 6}));
  EXPECT_EQ(found[2]["id"], 4) << "the number of its line";
  std::vector<double> sums, means;
  for (size_t i = 0; i < 3; ++i) {
    const auto wanted = expected(std::vector<std::string>{"abcde", "abzzzzzz", "abq"}[i], 2);
    expect_logprobs(found[2]["choices"][i], wanted);
    sums.push_back(std::accumulate(wanted.begin(), wanted.end(), 0.0));
    means.push_back(sums.back() / static_cast<double>(wanted.size()));
  }
  EXPECT_EQ(found[2]["best"], std::ranges::max_element(sums) - sums.begin());
  EXPECT_EQ(found[2]["best_per_token"], std::ranges::max_element(means) - means.begin());
  EXPECT_EQ(found[2]["answer"], 2);
  EXPECT_TRUE(found[3]["logprobs"].empty()) << "nothing comes before the first token";
  EXPECT_TRUE(found[3]["perplexity"].is_null());
  expect_logprobs(found[4], expected("abc", 1));
  EXPECT_EQ(found[5]["sum"], 0);
  EXPECT_THAT(result.err, HasSubstr("6 records"));
  EXPECT_THAT(result.err, HasSubstr("1 questions with an answer"));
}

TEST_F(Score, FileStandardInputAndSmallBatchesGiveTheSameScores) {
  const auto whole = lines_of(run(kRecords).out);
  const auto out = (folder_ / "out.jsonl").string();
  const auto to_file = run(kRecords, {"--output", out, "--batch-tokens", "1"});
  ASSERT_EQ(to_file.exit_code, 0) << to_file.err;
  EXPECT_EQ(to_file.out, "");
  const auto read = lines_of(read_file(out));
  const auto from_stdin = testing::run_process({testing::program(), "score", "--model", dir().string(), "--input", "-"},
                                               {.input = kRecords});
  const auto typed = lines_of(from_stdin.out);
  ASSERT_EQ(read.size(), whole.size());
  ASSERT_EQ(typed.size(), whole.size()) << from_stdin.err;
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_EQ(typed[i], whole[i]);
    EXPECT_EQ(read[i]["id"], whole[i]["id"]);
    if (!whole[i].contains("sum")) continue;
    EXPECT_NEAR(read[i]["sum"].get<double>(), whole[i]["sum"].get<double>(), 1e-4);
  }
}

TEST_F(Score, EveryParallelLayoutGivesTheSameScores) {
  const auto alone = lines_of(run(kRecords).out);
  for (const auto& settings :
       std::vector<std::vector<std::string>>{{"--nproc", "2"},
                                             {"--nproc", "3"},
                                             {"--nproc", "2", "parallel.dp_replicate=2", "parallel.dp_shard=1"},
                                             {"--nproc", "2", "parallel.tp=2"},
                                             {"--nproc", "4", "parallel.tp=2"},
                                             {"--nproc", "2", "parallel.tp=2", "parallel.sequence_parallel=true"},
                                             {"--nproc", "2", "parallel.cp=2"},
                                             {"--nproc", "2", "parallel.pp=2"},
                                             {"--nproc", "4", "parallel.pp=2", "parallel.cp=2"}}) {
    const auto several = run(kRecords, settings);
    ASSERT_EQ(several.exit_code, 0) << several.err;
    const auto found = lines_of(several.out);
    ASSERT_EQ(found.size(), alone.size()) << settings.back();
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_EQ(found[i]["id"], alone[i]["id"]);
      const bool choices = alone[i].contains("choices");
      const auto& wanted = choices ? alone[i]["choices"][1]["logprobs"] : alone[i]["logprobs"];
      const auto& given = choices ? found[i]["choices"][1]["logprobs"] : found[i]["logprobs"];
      ASSERT_EQ(given.size(), wanted.size());
      for (size_t t = 0; t < wanted.size(); ++t) {
        EXPECT_NEAR(given[t].get<double>(), wanted[t].get<double>(), 1e-5) << settings.back();
      }
    }
  }
}

TEST_F(Score, IdsKeepTheirDigits) {
  const std::string id = R"({"n":[12345678901234567890123,-98765432109876543210,0.5,1e400]})";
  const auto found = run("{\"id\": " + id + ", \"text\": \"ab\"}\n");
  ASSERT_EQ(found.exit_code, 0) << found.err;
  EXPECT_THAT(found.out, HasSubstr("{\"id\":" + id + ","));
}

TEST_F(Score, ALineWithTextAndPromptIsRefused) {
  const auto found = run(R"({"text": "ab", "prompt": "a", "completion": "b"})");
  EXPECT_EQ(found.exit_code, 3) << found.err;
  EXPECT_THAT(found.err, HasSubstr("in.jsonl:1:2: found both 'text' and 'prompt', wanted one of them"));
  EXPECT_EQ(run(R"({"text": null, "prompt": "a", "completion": "b"})").exit_code, 0);
}

TEST_F(Score, KeysOfTheInputCanBeRenamed) {
  const auto result = run(R"({"task_id": "HumanEval/0", "prompt": "ab", "canonical_solution": "cd", "text": "q"})",
                          {"--id-key", "task_id", "--completion-key", "canonical_solution"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(lines_of(result.out)[0]["id"], "HumanEval/0");
  expect_logprobs(lines_of(result.out)[0], expected("abcd", 2));
}

TEST_F(Score, ErrorsNameFileLineAndColumn) {
  const auto expect = [&](const std::string& input, const std::string& part, std::vector<std::string> more = {},
                          int code = 3) {
    const auto out = (folder_ / "never.jsonl").string();
    more.insert(more.end(), {"--output", out});
    const auto result = run(input, more);
    EXPECT_EQ(result.exit_code, code) << result.err;
    EXPECT_THAT(result.err, HasSubstr(part));
    EXPECT_FALSE(std::filesystem::exists(out));
  };
  const std::string good = R"({"text": "abc"})";
  expect(good + "\n{\"text\": oops}\n", "in.jsonl:2:10: ");
  expect(good + "\n\n[1]\n", "in.jsonl:3:1: found an array");
  expect(R"({"id": 1, "text": 5})", "in.jsonl:1:11: 'text' is 5, wanted a string");
  expect(R"({"id": 1})", "in.jsonl:1:1: no 'text'; wanted 'text', 'prompt' and 'completion'");
  expect(R"({"prompt": "a"})", "in.jsonl:1:1: no 'completion'");
  expect(R"({"prompt": "a", "choices": []})", "in.jsonl:1:17: 'choices' is an array of 0 values");
  expect(R"({"prompt": "a", "choices": ["b", 1]})", "in.jsonl:1:17: choice 1 is 1, wanted a string");
  expect(R"({"prompt": "a", "choices": ["b"], "answer": 1})", "in.jsonl:1:35: 'answer' is 1");
  expect("{\"text\": \"" + std::string(65, 'a') + "\"}", "in.jsonl:1:2: 65 tokens, the model's context is 64");
  expect(good, "wanted parallel.KEY=VALUE", {"train.steps=3"}, 2);
  expect(good, "multiply to the 1 ranks", {"parallel.dp_shard=3"}, 2);
  expect(good, "found 'int3'", {"--dtype", "int3"}, 2);
  expect(good, "--batch-tokens: found 0", {"--batch-tokens", "0"}, 2);
  const auto missing = testing::run_process(
      {testing::program(), "score", "--model", dir().string(), "--input", (folder_ / "none").string(), "--nproc", "2"});
  EXPECT_NE(missing.exit_code, 0);
  EXPECT_THAT(missing.err, HasSubstr("none"));
}

}  // namespace
}  // namespace tessera
