// Tests of sequences with slow token masks in an engine that also computes other sequences. Work is counted in engine
// steps, not in time.
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/models/generation/engine.h"
#include "tessera/models/generation/row_model.h"
#include "tessera/text/grammar/json_schema.h"
#include "tessera/text/grammar/token_constraint.h"
#include "tests/cli/tiny_tokenizer.h"
#include "tests/models/tiny.h"
#include "tests/serve/hostile_requests.h"
#include "tests/support/alone_on_device.h"

namespace tessera {
namespace {

// The tokens, the end and the error that a sequence has reported so far.
struct Followed {
  std::vector<int64_t> tokens{};
  std::optional<Finish> finish{};
  std::string error{};
};

class SlowMasks : public ::testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    if (testing::test_device().is_cpu()) make_row_model(*model_, kernels::WeightFormat::kFloat32);
  }
  static std::vector<int64_t> prompt(int64_t seed, int64_t count) {
    std::vector<int64_t> tokens;
    for (int64_t i = 0; i < count; ++i) tokens.push_back((seed * 31 + i * i * 7 + i * 3) % 37);
    return tokens;
  }
  std::shared_ptr<text::GrammarMasks> masks_of(const Json& schema) const {
    text::GrammarBuilder build;
    text::JsonParts json(build);
    const auto root = text::JsonSchema(json, JsonReader(schema, "schema")).value();
    return std::make_shared<text::GrammarMasks>(std::move(build).finish(root),
                                                std::make_shared<const text::SortedVocabulary>(tokenizer_));
  }
  static GenerationRequest request(Followed& into, std::vector<int64_t> prompt, int64_t count,
                                   const std::shared_ptr<text::GrammarMasks>& masks = nullptr) {
    GenerationRequest made{.prompt = std::move(prompt), .options = {.max_new_tokens = count}};
    if (masks) made.options.constraint = std::make_shared<text::TokenConstraint>(masks, std::vector<int64_t>{});
    made.on_token = [&into](const NewToken& token) {
      if (token.finish != Finish::kError) into.tokens.push_back(token.token);
      into.finish = token.finish;
      if (token.error) into.error = token.error->what();
      return true;
    };
    return made;
  }
  std::vector<int64_t> alone(const std::vector<int64_t>& prompt, int64_t count,
                             const std::shared_ptr<text::GrammarMasks>& masks = nullptr) const {
    GenerationOptions options{.max_new_tokens = count};
    if (masks) options.constraint = std::make_shared<text::TokenConstraint>(masks, std::vector<int64_t>{});
    return generate(*model_, prompt, options);
  }

  // A vocabulary of 17 characters and 20 longer tokens with up to 40 letters.
  static text::Tokenizer long_tokens() {
    auto file = nlohmann::json::parse(testing::character_tokenizer("{}[]\",0123456789a"));
    auto& vocabulary = file["model"]["vocab"];
    while (vocabulary.size() < 37) vocabulary[std::string(2 * (vocabulary.size() - 16), 'a')] = vocabulary.size();
    return text::Tokenizer::from_json(file.dump(), "test");
  }

  // A mask of `slow_` takes about 40 shares of kShare steps, because every character belongs to one of 300 strings.
  static constexpr int64_t kShare = 8000;
  const Json slow_ = testing::schema_of_lengths(300);
  const Json quick_ = Json::parse(R"({"type": "array", "items": {"type": "integer"}, "minItems": 30})");
  const text::Tokenizer tokenizer_ = long_tokens();
  const std::shared_ptr<CausalLM> model_ = testing::tiny_model();
};

TEST_F(SlowMasks, DelayOnlyTheirSequence) {
  Engine engine(model_, {.pages = 32, .mask_steps = kShare});
  Followed hostile, free, formed;
  const auto quick = masks_of(quick_), slow = masks_of(slow_);
  engine.add(request(hostile, prompt(1, 5), 3, slow));
  engine.add(request(free, prompt(2, 7), 20));
  engine.add(request(formed, prompt(3, 9), 20, quick));
  int64_t steps = 0;
  while (free.tokens.size() < 20) {
    ASSERT_TRUE(engine.step());
    ++steps;
    EXPECT_EQ(free.tokens.size(), static_cast<size_t>(steps)) << "a token each step";
    EXPECT_EQ(formed.tokens.size(), static_cast<size_t>(steps));
    EXPECT_TRUE(steps <= 2 || engine.counts().waiting_for_masks == 1) << steps;
  }
  EXPECT_LE(hostile.tokens.size(), 1U) << "behind the quote its mask takes more than 20 shares";
  EXPECT_EQ(engine.counts().steps, steps) << "forwards";
  while (engine.step()) {
  }
  EXPECT_EQ(hostile.finish, Finish::kLength) << hostile.error;
  EXPECT_EQ(hostile.tokens, alone(prompt(1, 5), 3, slow));
  EXPECT_EQ(free.tokens, alone(prompt(2, 7), 20));
  EXPECT_EQ(formed.tokens, alone(prompt(3, 9), 20, quick));
  EXPECT_EQ(engine.counts().waiting_for_masks, 0);
  EXPECT_EQ(engine.counts().new_tokens, 43);
}

// One engine step does the work of one share for all waiting sequences together.
TEST_F(SlowMasks, ShareTheMaskStepsOfAnEngineStep) {
  Engine engine(model_, {.pages = 64, .mask_steps = kShare});
  const auto slow = masks_of(slow_);
  std::vector<Followed> hostile(3);
  Followed free;
  engine.add(request(free, prompt(9, 6), 50));
  for (size_t i = 0; i < hostile.size(); ++i) {
    engine.add(request(hostile[i], prompt(static_cast<int64_t>(i), 5), 2, slow));
  }
  int64_t steps = 0;
  for (; free.tokens.size() < 50 && steps < 100; ++steps) engine.step();
  EXPECT_EQ(steps, 50);
  while (engine.step()) {
  }
  for (size_t i = 0; i < hostile.size(); ++i) {
    EXPECT_EQ(hostile[i].tokens, alone(prompt(static_cast<int64_t>(i), 5), 2, slow)) << i;
  }
}

// Other sequences arrive while max_sequences or more sequences wait for masks.
TEST_F(SlowMasks, DoNotTakeTheSlotsOfOtherSequences) {
  Engine engine(model_, {.pages = 64, .max_sequences = 2, .mask_steps = kShare});
  const auto slow = masks_of(slow_);
  std::vector<Followed> hostile(4), free(3);
  for (size_t i = 0; i < hostile.size(); ++i) {
    engine.add(request(hostile[i], prompt(static_cast<int64_t>(i), 5), 3, slow));
  }
  for (size_t i = 0; i < free.size(); ++i) engine.add(request(free[i], prompt(static_cast<int64_t>(i) + 7, 6), 5));
  int64_t steps = 0;
  for (; !free.back().finish && steps < 100; ++steps) ASSERT_TRUE(engine.step());
  EXPECT_LT(steps, 20) << "a mask alone takes 40";
  while (engine.step()) {
  }
  for (size_t i = 0; i < free.size(); ++i) EXPECT_EQ(free[i].tokens, alone(prompt(static_cast<int64_t>(i) + 7, 6), 5));
  for (size_t i = 0; i < hostile.size(); ++i) {
    EXPECT_EQ(hostile[i].tokens, alone(prompt(static_cast<int64_t>(i), 5), 3, slow)) << i;
  }
}

// A client disconnects, or its time limit is over, while the mask of its sequence is computed. The sequence must free
// its place.
TEST_F(SlowMasks, StopWhenTheirSequenceIsCancelled) {
  Engine engine(model_, {.pages = 8, .mask_steps = kShare});
  Followed hostile;
  const auto id = engine.add(request(hostile, prompt(1, 5), 3, masks_of(slow_)));
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(engine.step());
  EXPECT_EQ(engine.counts().waiting_for_masks, 1);
  engine.cancel(id);
  EXPECT_FALSE(engine.step());
  EXPECT_LE(hostile.tokens.size(), 1U);
  EXPECT_EQ(engine.counts().running + engine.counts().waiting, 0);
}

TEST_F(SlowMasks, AreKeptWhenTheirSequenceIsPreempted) {
  Engine engine(model_, {.pages = 5, .max_sequences = 6, .mask_steps = kShare});
  const auto slow = masks_of(slow_);
  std::vector<Followed> followed(6);
  for (size_t i = 0; i < followed.size(); ++i) {
    engine.add(request(followed[i], prompt(static_cast<int64_t>(i), 12), i % 2 ? 3 : 40, i % 2 ? slow : nullptr));
  }
  while (engine.step()) {
  }
  EXPECT_GT(engine.counts().preempted, 0);
  for (size_t i = 0; i < followed.size(); ++i) {
    EXPECT_EQ(followed[i].tokens, alone(prompt(static_cast<int64_t>(i), 12), i % 2 ? 3 : 40, i % 2 ? slow : nullptr))
        << i << followed[i].error;
  }
}

// An error in one grammar ends only its own sequence. Here the vocabulary cannot write the required text.
TEST_F(SlowMasks, ErrorOfAGrammarEndsOnlyItsSequence) {
  Engine engine(model_, {.pages = 8});
  Followed wrong, free;
  engine.add(request(wrong, prompt(1, 5), 9, masks_of({{"const", "xyz"}})));
  engine.add(request(free, prompt(2, 5), 9));
  while (engine.step()) {
  }
  EXPECT_EQ(wrong.finish, Finish::kError);
  EXPECT_EQ(wrong.tokens.size(), 1U);
  EXPECT_THAT(wrong.error, ::testing::HasSubstr("no token of the vocabulary"));
  EXPECT_EQ(free.tokens, alone(prompt(2, 5), 9));
}

}  // namespace
}  // namespace tessera
