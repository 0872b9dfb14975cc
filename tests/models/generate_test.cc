// Tests of generate(): choice of a token from logits, sampling, stop conditions and errors.
#include "tessera/models/generation/generate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tests/models/tiny.h"
#include "tests/support/alone_on_device.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using testing::tiny_model;

at::Tensor logits_of(std::vector<double> probabilities) { return at::tensor(probabilities).log().to(at::kFloat); }

// Counts of each token in 4000 draws. The position is part of the random counter, so every draw is independent.
std::map<int64_t, int> draws(const at::Tensor& logits, const GenerationOptions& options) {
  std::map<int64_t, int> counts;
  const std::vector<int64_t> context(4000, 0);
  for (size_t length = 0; length < context.size(); ++length) {
    ++counts[choose_token(logits, std::span(context).first(length), options)];
  }
  return counts;
}

TEST(ChooseToken, GreedyTakesTheFirstOfEqualMaxima) {
  EXPECT_EQ(choose_token(at::tensor(std::vector<float>{1, 5, 5, 2}), {}, {}), 1);
}

TEST(ChooseToken, SamplesFollowTheDistribution) {
  const auto counts = draws(logits_of({0.5, 0.3, 0.2}), {.sample = true, .seed = 3});
  EXPECT_NEAR(counts.at(0), 2000, 130);
  EXPECT_NEAR(counts.at(1), 1200, 120);
  EXPECT_NEAR(counts.at(2), 800, 105);
}

TEST(ChooseToken, TemperatureSharpens) {
  const auto counts = draws(logits_of({0.5, 0.3, 0.2}), {.sample = true, .temperature = 0.5});
  EXPECT_NEAR(counts.at(0), 4000 * 0.25 / 0.38, 130);
}

TEST(ChooseToken, TopKAndTopPKeepTheMostLikelyTokens) {
  const auto logits = logits_of({0.1, 0.4, 0.2, 0.3});
  const auto two = draws(logits, {.sample = true, .top_k = 2});
  EXPECT_EQ(two.size(), 2U);
  EXPECT_NEAR(two.at(1), 4000 * 4 / 7, 130);
  EXPECT_EQ(draws(logits, {.sample = true, .top_p = 0.69}).size(), 2U);
  EXPECT_EQ(draws(logits, {.sample = true, .top_p = 0.71}).size(), 3U);
  EXPECT_EQ(draws(logits, {.sample = true, .top_p = 1e-9}).size(), 1U) << "the likeliest always stays";
}

TEST(ChooseToken, RepetitionPenaltyLowersEarlierTokens) {
  const std::vector<int64_t> context = {1, 1, 3};
  EXPECT_EQ(choose_token(at::tensor(std::vector<float>{2, 3, 1, -1}), context, {.repetition_penalty = 2.0}), 0);
  EXPECT_EQ(choose_token(at::tensor(std::vector<float>{-1.5, -2, -9, -1}), context, {.repetition_penalty = 2.0}), 0);
}

TEST(ChooseToken, NanLogitsAreAnError) { EXPECT_THROW(choose_token(at::full({4}, std::nan("")), {}, {}), Error); }

TEST(Generate, GreedyIsTheArgmaxOfTheFullForwardAtEveryStep) {
  at::NoGradGuard no_grad;
  auto model = tiny_model();
  std::vector<int64_t> context = {4, 9, 2, 30};
  const auto found = generate(*model, context, {.max_new_tokens = 12});
  for (int step = 0; step < 12; ++step) {
    const auto logits = model->logits({.tokens = testing::here(at::tensor(context).unsqueeze(0))});
    context.push_back(logits[0][-1].argmax().item<int64_t>());
  }
  EXPECT_EQ(found, std::vector<int64_t>(context.begin() + 4, context.end()));
}

TEST(Generate, SeedDeterminesSampledTokens) {
  auto model = tiny_model();
  const std::vector<int64_t> prompt = {4, 9};
  const auto with_seed = [&](uint64_t seed) {
    return generate(*model, prompt, {.max_new_tokens = 20, .sample = true, .seed = seed});
  };
  EXPECT_EQ(with_seed(1), with_seed(1));
  EXPECT_NE(with_seed(1), with_seed(2));
}

TEST(Generate, EndsAtStopTokenCallbackAndContext) {
  auto model = tiny_model();
  const std::vector<int64_t> prompt = {4, 9};
  const auto free_run = generate(*model, prompt, {.max_new_tokens = 1000});
  EXPECT_EQ(free_run.size(), 62U) << "64 tokens of context";
  const auto stop = free_run[5];
  const auto first = std::ranges::find(free_run, stop);
  const auto stopped = generate(*model, prompt, {.max_new_tokens = 1000, .stop_tokens = {36, stop}});
  EXPECT_EQ(stopped, std::vector<int64_t>(free_run.begin(), first + 1));
  EXPECT_EQ(generate(*model, prompt, {}, [](int64_t) { return false; }).size(), 1U);
}

TEST(Generate, WrongPromptsAndOptionsAreErrors) {
  auto model = tiny_model();
  EXPECT_THROW(generate(*model, {}, {}), Error);
  EXPECT_THROW(generate(*model, std::vector<int64_t>{37}, {}), Error);
  EXPECT_THROW(generate(*model, std::vector<int64_t>(64, 1), {}), Error);
  for (const auto& wrong :
       {GenerationOptions{.max_new_tokens = 0}, GenerationOptions{.temperature = 0.0}, GenerationOptions{.top_k = -1},
        GenerationOptions{.top_p = 1.5}, GenerationOptions{.repetition_penalty = 0}}) {
    EXPECT_THROW(generate(*model, std::vector<int64_t>{1}, wrong), Error);
  }
}

TEST(GenerationOptions, ComeFromTheFolderOrElseFromTheModelConfig) {
  testing::TempFolder folder;
  const auto config = ModelConfig::parse(testing::tiny_config(), "t");
  EXPECT_EQ(GenerationOptions::from_folder(folder.path(), config).stop_tokens, (std::vector<int64_t>{2, 3}));
  publish_file(
      folder / "generation_config.json",
      R"({"eos_token_id": [7, 8], "do_sample": true, "temperature": 0.6, "top_p": 0.9, "top_k": null, "num_beams": 1})");
  const auto options = GenerationOptions::from_folder(folder.path(), config);
  EXPECT_EQ(options.stop_tokens, (std::vector<int64_t>{7, 8}));
  EXPECT_EQ(options.temperature, 0.6);
  EXPECT_EQ(options.top_p, 0.9);
  EXPECT_EQ(options.top_k, 50);
  EXPECT_FALSE(options.sample);
  const std::vector<std::string> wrongs = {"[",
                                           "[]",
                                           R"({"temperature": "hot"})",
                                           R"({"top_k": 1.5})",
                                           R"({"top_p": 2})",
                                           R"({"eos_token_id": ["x"]})",
                                           R"({"eos_token_id": 1000000000000})",
                                           std::string(100'000, '['),
                                           R"({"eos_token_id": )" + std::string(100'000, '[')};
  for (const auto& wrong : wrongs) {
    publish_file(folder / "generation_config.json", wrong);
    EXPECT_THROW(GenerationOptions::from_folder(folder.path(), config), Error) << wrong.substr(0, 60);
  }
}

}  // namespace
}  // namespace tessera
