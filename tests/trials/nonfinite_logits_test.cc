// Tests of logits and log-probs that are not finite although all weights are finite. The affected sequence ends with an
// error that names the position; the other sequences give the same tokens as alone.
#include <ATen/Parallel.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <thread>

#include "tessera/models/generation/engine.h"
#include "tessera/models/generation/load.h"
#include "tessera/models/generation/row_model.h"
#include "tessera/serve/server.h"
#include "tests/support/http_client.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"
#include "tests/trials/nonfinite_models.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::kOverflowingToken;
using ::testing::Not;

std::shared_ptr<CausalLM> in_rows(std::shared_ptr<CausalLM> model) {
  make_row_model(*model, kernels::WeightFormat::kFloat32);
  return model;
}

struct Outcome {
  std::vector<int64_t> tokens;
  std::optional<Finish> finish;
  std::string error;
};

GenerationRequest request_into(Outcome& outcome, std::vector<int64_t> prompt,
                               GenerationOptions options = {.max_new_tokens = 20}) {
  return {.prompt = std::move(prompt), .options = std::move(options), .on_token = [&outcome](const NewToken& made) {
            EXPECT_FALSE(outcome.finish) << "nothing comes behind the last one";
            if (made.error) outcome.error = made.error->what();
            if (!made.error) outcome.tokens.push_back(made.token);
            outcome.finish = made.finish;
            return true;
          }};
}

std::vector<int64_t> prompt_of(int64_t seed, int64_t length) {
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < length; ++i) tokens.push_back((seed * 5 + i * 3) % 24);
  return tokens;
}

// A token bias prevents the generation of the overflowing token, so a sequence contains this token only if its prompt
// does.
GenerationOptions without_overflow(int64_t count) {
  return {.max_new_tokens = count, .logit_bias = {{kOverflowingToken, -100}}};
}

TEST(NonfiniteLogits, EndTheirSequenceAndDoNotChangeOthersOfTheBatch) {
  const auto model = in_rows(testing::overflowing_model());
  constexpr int kSequences = 6;
  std::vector<Outcome> alone(kSequences), together(kSequences);
  for (int i = 0; i < kSequences; ++i) {
    Engine engine(model, {.pages = 40});
    engine.add(request_into(alone[i], prompt_of(i, 3 + 9 * i), without_overflow(30)));
    while (engine.step()) {
    }
    ASSERT_EQ(alone[i].tokens.size(), 30U) << alone[i].error;
  }
  // There are few pages, so that other sequences get the pages with NaN while they run.
  Engine engine(model, {.pages = 24, .max_sequences = 4, .prompt_block = 7});
  std::vector<Outcome> spoilt(kSequences);
  for (int i = 0; i < kSequences; ++i) {
    auto prompt = prompt_of(i + 20, 5 + 11 * i);
    prompt[static_cast<size_t>(2 * i)] = kOverflowingToken;
    engine.add(request_into(spoilt[i], prompt, without_overflow(30)));
    engine.add(request_into(together[i], prompt_of(i, 3 + 9 * i), without_overflow(30)));
  }
  int64_t steps = 0;
  while (engine.step()) ASSERT_LT(++steps, 2000);
  for (int i = 0; i < kSequences; ++i) {
    EXPECT_EQ(together[i].tokens, alone[i].tokens) << i;
    EXPECT_TRUE(spoilt[i].tokens.empty());
    EXPECT_EQ(spoilt[i].finish, Finish::kError);
    EXPECT_THAT(spoilt[i].error, HasSubstr(fmt::format("position {}: the logit of token 0 is nan", 5 + 11 * i)));
  }
  EXPECT_EQ(engine.counts().pages_in_use, 0);
}

TEST(NonfiniteLogits, ErrorsOfScoredPromptsNameThePosition) {
  const auto model = in_rows(testing::overflowing_model());
  for (const int64_t block : {3, 64}) {
    Engine engine(model, {.pages = 24, .prompt_block = block});
    Outcome outcome, other;
    auto prompt = prompt_of(1, 20);
    prompt[8] = kOverflowingToken;
    auto request = request_into(outcome, prompt, without_overflow(4));
    request.log_probs = 2;
    request.prompt_log_probs = true;
    engine.add(std::move(request));
    engine.add(request_into(other, prompt_of(2, 9), without_overflow(4)));
    while (engine.step()) {
    }
    EXPECT_EQ(outcome.finish, Finish::kError);
    EXPECT_THAT(outcome.error, HasSubstr("position 9: the logit of token 0 is nan"))
        << "behind the token that overflows";
    EXPECT_EQ(other.tokens.size(), 4U) << other.error;
    EXPECT_EQ(engine.counts().pages_in_use, 0);
  }
}

TEST(NonfiniteLogits, AreErrorsForEverySamplingMethod) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<int64_t> context = {1, 2, 3, 4};
  const std::vector<GenerationOptions> choices = {{},
                                                  {.sample = true, .temperature = 1e-6, .seed = 3},
                                                  {.sample = true,
                                                   .temperature = 0.7,
                                                   .top_k = 2,
                                                   .top_p = 0.5,
                                                   .min_p = 0.1,
                                                   .repetition_penalty = 1.3,
                                                   .seed = 3},
                                                  {.presence_penalty = 1, .frequency_penalty = 1},
                                                  {.logit_bias = {{0, 100}, {1, -100}}}};
  for (const auto& options : choices) {
    for (const size_t place : {0, 1, 2, 3, 4}) {
      for (const float value : {kNan, -kNan, kInfinity}) {
        std::vector<float> scores = {0.5F, 1, 2, -1, 0};
        scores[place] = value;
        try {
          choose_from_scores(scores, {context, 2}, options);
          ADD_FAILURE() << "a token was chosen with " << value << " at " << place;
        } catch (const Error& error) {
          EXPECT_EQ(error.exit_code(), 1);
          EXPECT_THAT(error.what(), HasSubstr(fmt::format("position 4: the logit of token {} is {}", place,
                                                          std::isnan(value) ? "nan" : "inf")));
        }
      }
    }
    std::vector<float> never(5, -kInfinity);
    EXPECT_THROW(choose_from_scores(never, {context, 2}, options), Error);
    never[3] = 0;
    EXPECT_EQ(choose_from_scores(never, {context, 2}, options), 3);
  }
}

class NonfiniteVerbs : public ::testing::Test {
 protected:
  void SetUp() override { testing::write_model(*testing::overflowing_model(), dir()); }
  fs::path dir() const { return folder_ / "model"; }
  testing::ProcessResult run(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), testing::program());
    return testing::run_process(arguments, {.timeout_seconds = 60});
  }
  testing::TempFolder folder_;
};

TEST_F(NonfiniteVerbs, GenerateExitsWithOneAndNamesThePosition) {
  const auto model = dir().string();
  publish_file(folder_ / "schema.json", R"({"type": "object", "properties": {"a": {"type": "string"}}})");
  publish_file(folder_ / "batch.jsonl", R"({"id": 1, "prompt": "abc"})"
                                        "\n"
                                        R"({"id": 2, "prompt": "abz"})"
                                        "\n");
  for (const std::vector<std::string>& more :
       {std::vector<std::string>{"--prompt", "az", "--json"},
        {"--prompt", "az", "--temperature", "1", "--seed", "2", "--top-p", "0.9"},
        {"--prompt", "az", "--json-schema", (folder_ / "schema.json").string()}}) {
    std::vector<std::string> all = {"generate", "--model", model, "--max-new-tokens", "5"};
    all.insert(all.end(), more.begin(), more.end());
    const auto found = run(all);
    EXPECT_EQ(found.exit_code, 1) << fmt::format("{}", fmt::join(all, " "));
    EXPECT_THAT(found.err, HasSubstr("position 2: the logit of token 0 is nan"));
    EXPECT_EQ(found.out, "");
  }
  const auto batch =
      run({"generate", "--model", model, "--max-new-tokens", "1", "--batch", (folder_ / "batch.jsonl").string()});
  EXPECT_EQ(batch.exit_code, 1);
  EXPECT_THAT(batch.out, AllOf(HasSubstr(R"("id":1)"), Not(HasSubstr(R"("id":2)"))));
  EXPECT_THAT(batch.err, HasSubstr("position 3: the logit of token 0 is nan"));
}

TEST_F(NonfiniteVerbs, ScoreExitsWithOneNamesRecordAndTokenAndLeavesNoFile) {
  const auto score = [&](const std::string& input) {
    publish_file(folder_ / "in.jsonl", input);
    return run({"score", "--model", dir().string(), "--input", (folder_ / "in.jsonl").string(), "--output",
                (folder_ / "out.jsonl").string()});
  };
  const std::string fine = R"({"id": "x", "text": "abc abd"})"
                           "\n";
  ASSERT_EQ(score(fine).exit_code, 0);
  EXPECT_THAT(read_file(folder_ / "out.jsonl"), Not(HasSubstr("null")));
  fs::remove(folder_ / "out.jsonl");
  const auto text = score(fine + R"({"id": "y", "text": "abzab"})");
  EXPECT_EQ(text.exit_code, 1);
  EXPECT_THAT(text.err,
              AllOf(HasSubstr(R"(record '"y"': the log-prob of token )"), HasSubstr(" of 5 "), HasSubstr(" is nan")));
  const auto choices = score(fine + R"({"prompt": "ab", "choices": ["c", "d", "zc"], "answer": 0})");
  EXPECT_EQ(choices.exit_code, 1);
  EXPECT_THAT(choices.err, AllOf(HasSubstr("record '2', choice 2: the log-prob of token "), HasSubstr(" of 4 ")));
  EXPECT_FALSE(fs::exists(folder_ / "out.jsonl"));
  EXPECT_EQ(text.out + choices.out, "");
}

TEST(NonfiniteServe, OnlyTheAffectedRequestsGetStatus500) {
  at::set_num_threads(1);
  const auto model = testing::overflowing_model();
  serve::ServedModel served{
      .name = "tiny",
      .config = model->config(),
      .defaults = {},
      .tokenizer = text::Tokenizer::from_json(testing::character_tokenizer(testing::kTrialCharacters), "test"),
      .chat = std::nullopt,
      .cache_tokens = 1024,
      .limits = {}};
  serve::Scheduler scheduler(in_rows(model), {.pages = 64, .max_sequences = 4}, served.limits);
  auto listening = listen_at("127.0.0.1", 0, ListenScope::kThisHost);
  const int port = listening.port;
  serve::Server server(served, scheduler, serve::ServerOptions{std::move(listening), ""});
  const auto ask = [&](const std::string& prompt, const json& more = json::object()) {
    json body = {{"model", "tiny"},
                 {"prompt", prompt},
                 {"max_tokens", 12},
                 {"temperature", 0},
                 {"logit_bias", {{std::to_string(kOverflowingToken), -100}}}};
    body.update(more);
    return testing::http(port, "POST", "/v1/completions", body.dump());
  };
  const auto text_of = [](const testing::HttpReply& reply) {
    EXPECT_EQ(reply.status, 200) << reply.body;
    return json::parse(reply.body)["choices"][0]["text"].get<std::string>();
  };
  const auto wanted = text_of(ask("abc"));
  std::vector<testing::HttpReply> good(6), bad(6);
  std::vector<std::thread> clients;
  for (size_t i = 0; i < good.size(); ++i) {
    clients.emplace_back([&, i] { good[i] = ask("abc"); });
    clients.emplace_back([&, i] { bad[i] = ask(std::string(i, 'b') + "za", {{"seed", i}, {"temperature", i % 2}}); });
  }
  for (auto& client : clients) client.join();
  for (size_t i = 0; i < good.size(); ++i) {
    EXPECT_EQ(text_of(good[i]), wanted);
    EXPECT_EQ(bad[i].status, 500) << bad[i].body;
    EXPECT_THAT(bad[i].body, HasSubstr(fmt::format("position {}: the logit of token 0 is nan", i + 2)));
  }
  const auto echoed = ask("abzcd", {{"echo", true}, {"logprobs", 2}});
  EXPECT_EQ(echoed.status, 500);
  EXPECT_THAT(echoed.body, HasSubstr("position 3: the logit of token 0 is nan"));
  const auto streamed = ask("az", {{"stream", true}});
  EXPECT_THAT(streamed.body, AllOf(HasSubstr("position 2: the logit of token 0 is nan"), Not(HasSubstr("[DONE]"))));
  const auto several = ask("az", {{"n", 3}});
  EXPECT_EQ(several.status, 500);
  EXPECT_EQ(text_of(ask("abc")), wanted);
  // An answer arrives shortly before its sequence is removed from the counts.
  const auto busy = [&] { return scheduler.counts().running + scheduler.counts().waiting; };
  for (int turn = 0; turn < 500 && busy() > 0; ++turn) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(busy(), 0);
}

}  // namespace
}  // namespace tessera
