// The tokens that a grammar allows: against a check of each token alone, in slices, and within the limits of steps and
// memory.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <random>

#include "tessera/base/error.h"
#include "tessera/text/grammar/grammar_memory.h"
#include "tessera/text/grammar/token_constraint.h"
#include "tests/cli/tiny_tokenizer.h"
#include "tests/support/heap_bytes.h"
#include "tests/support/sanitized.h"
#include "tests/text/schema_grammar.h"

namespace tessera::text {
namespace {

using ::testing::HasSubstr;

// A vocabulary of tokens of one to four characters from JSON texts.
class GrammarMasksTest : public ::testing::Test {
 protected:
  GrammarMasksTest() {
    std::mt19937_64 draw(7);
    const std::string letters = "{}[]\",:0123 truefalsn-\\";
    nlohmann::json vocabulary;
    for (const char letter : letters) vocabulary[std::string(1, letter)] = vocabulary.size();
    while (vocabulary.size() < 2000) {
      std::string token;
      for (size_t left = 2 + draw() % 3; left > 0; --left) token += letters[draw() % letters.size()];
      if (!vocabulary.contains(token)) vocabulary[token] = vocabulary.size();
    }
    auto file = nlohmann::json::parse(testing::character_tokenizer("a"));
    file["model"]["vocab"] = vocabulary;
    file["added_tokens"] = nlohmann::json::array();
    for (const auto& [id, content, special] : {std::tuple{2000, "<eos>", true}, {2001, "<call>", false}}) {
      file["added_tokens"].push_back({{"id", id},
                                      {"content", content},
                                      {"special", special},
                                      {"single_word", false},
                                      {"lstrip", false},
                                      {"rstrip", false},
                                      {"normalized", false}});
    }
    tokenizer_.emplace(Tokenizer::from_json(file.dump(), "masks"));
  }
  std::optional<Tokenizer> tokenizer_;
};

TEST_F(GrammarMasksTest, MasksMatchCheckingEachToken) {
  const auto vocabulary = std::make_shared<const SortedVocabulary>(*tokenizer_);
  const auto grammar = schema_grammar(R"({"type": "array", "items": {"anyOf": [{"type": "string", "maxLength": 4},
                                          {"type": "integer"}, {"type": "boolean"}, {"const": "<call>"}]}})");
  const auto masks = std::make_shared<GrammarMasks>(grammar, vocabulary);
  GrammarStates states(grammar);
  std::mt19937_64 draw(3);
  int looked = 0, wholes = 0;
  for (int round = 0; round < 60; ++round) {
    TokenConstraint constraint(masks, {2000});
    std::vector<int64_t> made;
    int32_t state = states.start();
    while (made.size() < 30 && !constraint.complete(made)) {
      const auto allowed = constraint.allowed(made);
      ASSERT_EQ(allowed.size(), 2002U);
      std::vector<int64_t> choices;
      for (int64_t token = 0; token < 2002; ++token) {
        int32_t next = state;
        for (const char byte : tokenizer_->token_bytes(static_cast<TokenId>(token))) {
          next = states.next(next, static_cast<uint8_t>(byte));
        }
        const bool wanted = token == 2000 ? states.accepts(state) : next != GrammarStates::kDead;
        ASSERT_EQ(allowed[static_cast<size_t>(token)], wanted) << token << " after " << made.size();
        if (wanted && token != 2000) choices.push_back(token);
      }
      ++looked;
      made.push_back(choices[draw() % choices.size()]);
      for (const char byte : tokenizer_->token_bytes(static_cast<TokenId>(made.back()))) {
        state = states.next(state, static_cast<uint8_t>(byte));
      }
    }
    if (!constraint.complete(made)) continue;
    ++wholes;
    std::string text;
    for (const int64_t token : made) text += tokenizer_->token_bytes(static_cast<TokenId>(token));
    EXPECT_TRUE(Json::accept(text)) << text;
  }
  EXPECT_GT(looked, 200);
  EXPECT_GT(wholes, 3);
}

TEST_F(GrammarMasksTest, StopTokensAreAllowedAtCompleteTextsAndDeadEndsAreErrors) {
  const auto vocabulary = std::make_shared<const SortedVocabulary>(*tokenizer_);
  const auto numbers = std::make_shared<GrammarMasks>(schema_grammar(R"({"type": "integer"})"), vocabulary);
  const auto id = [&](const char* token) { return int64_t{*tokenizer_->token_to_id(token)}; };
  TokenConstraint constraint(numbers, {2000});
  EXPECT_FALSE(constraint.allowed({})[2000]);
  const std::vector<int64_t> made = {id("1")};
  EXPECT_TRUE(constraint.allowed(made)[2000]);
  EXPECT_FALSE(constraint.complete(made));  // digits may follow
  const std::vector<int64_t> wrong = {id("1"), id("{")};
  EXPECT_THROW(constraint.complete(wrong), Error);
  TokenConstraint never(std::make_shared<GrammarMasks>(schema_grammar(R"({"const": "xyz"})"), vocabulary), {2000});
  const std::vector<int64_t> quote = {id("\"")};
  EXPECT_FALSE(never.complete(quote));
  EXPECT_THROW(never.allowed(quote), Error);  // no token has an x
}

// A sequence keeps its position when the states of its grammar are dropped.
TEST_F(GrammarMasksTest, DroppingStatesKeepsSequencePositions) {
  const auto vocabulary = std::make_shared<const SortedVocabulary>(*tokenizer_);
  const auto masks =
      std::make_shared<GrammarMasks>(schema_grammar(R"({"type": "string", "maxLength": 200000})"), vocabulary);
  const int64_t quote = *tokenizer_->token_to_id("\""), letter = *tokenizer_->token_to_id("a");
  TokenConstraint early(masks, {2000}), late(masks, {2000});
  std::vector<int64_t> begun = {quote, letter}, long_one = {quote};
  const auto before = early.allowed(begun);
  long_one.insert(long_one.end(), 70'000, letter);  // one state each, together over the limit
  EXPECT_FALSE(late.complete(long_one));
  EXPECT_EQ(early.allowed(begun), before);
  begun.push_back(quote);
  EXPECT_TRUE(early.complete(begun));
  long_one.push_back(quote);
  EXPECT_TRUE(late.complete(long_one));
}

// Strings of exactly k characters for each k up to `count`. A character may belong to any of these strings.
std::string lengths(int count) {
  std::string schema = "{\"anyOf\": [";
  for (int k = 1; k <= count; ++k) {
    schema += fmt::format("{}{{\"type\": \"string\", \"minLength\": {}, \"maxLength\": {}}}", k > 1 ? "," : "", k, k);
  }
  return schema + "]}";
}

TEST_F(GrammarMasksTest, MasksMadeInSlicesMatchMasksMadeInOneCall) {
  const auto vocabulary = std::make_shared<const SortedVocabulary>(*tokenizer_);
  const auto grammar = schema_grammar(lengths(20));
  TokenConstraint whole(std::make_shared<GrammarMasks>(grammar, vocabulary), {2000});
  TokenConstraint sliced(std::make_shared<GrammarMasks>(grammar, vocabulary), {2000});
  std::vector<int64_t> made;
  for (const char* token : {"\"", "a", "t"}) {
    int slices = 1;
    while (!sliced.prepare_allowed_tokens(made, 200)) ++slices;
    EXPECT_GT(slices, made.empty() ? 0 : 3);
    EXPECT_EQ(sliced.allowed(made), whole.allowed(made));
    made.push_back(*tokenizer_->token_to_id(token));
    while (!sliced.prepare_complete(made, 1)) {
    }
    EXPECT_EQ(sliced.complete(made), whole.complete(made));
  }
}

TEST_F(GrammarMasksTest, StepsAreLimitedAndFewForSimpleGrammars) {
  const auto vocabulary = std::make_shared<const SortedVocabulary>(*tokenizer_);
  const std::vector<int64_t> quote = {*tokenizer_->token_to_id("\"")};
  TokenConstraint simple(
      std::make_shared<GrammarMasks>(schema_grammar(R"({"type": "string", "maxLength": 100})"), vocabulary), {2000});
  EXPECT_TRUE(simple.prepare_allowed_tokens(quote, 20'000)) << "an engine makes it within one of its steps";
  TokenConstraint hostile(std::make_shared<GrammarMasks>(schema_grammar(lengths(700)), vocabulary, nullptr, 100'000),
                          {2000});
  try {
    hostile.allowed(quote);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
    EXPECT_THAT(std::string(error.what()), HasSubstr("over 100000 steps"));
  }
}

// The counted memory must be near the memory in use. Each grammar stays within its share beside the others.
TEST_F(GrammarMasksTest, MemoryIsCountedAccuratelyAndLimitedPerGrammar) {
  const auto vocabulary = std::make_shared<const SortedVocabulary>(*tokenizer_);
  const auto memory = std::make_shared<GrammarMemory>(size_t{12} << 20);
  const auto grammar = schema_grammar(lengths(150));
  const int64_t before = testing::heap_bytes();
  {
    std::vector<std::shared_ptr<GrammarMasks>> forms;
    std::vector<std::unique_ptr<TokenConstraint>> sequences;
    for (int i = 0; i < 3; ++i) {
      forms.push_back(std::make_shared<GrammarMasks>(grammar, vocabulary, memory));
      sequences.push_back(std::make_unique<TokenConstraint>(forms.back(), std::vector<int64_t>{2000}));
    }
    EXPECT_EQ(memory->bytes_per_grammar(), size_t{4} << 20);
    std::mt19937_64 draw(5);
    int forgotten = 0;
    std::vector<size_t> last(3);
    std::vector<std::vector<int64_t>> made(3, {*tokenizer_->token_to_id("\"")});
    for (int round = 0; round < 12; ++round) {
      for (size_t i = 0; i < 3; ++i) {
        while (!sequences[i]->prepare_allowed_tokens(made[i], 20'000)) {
          forgotten += forms[i]->bytes() < last[i] ? 1 : 0;
          last[i] = forms[i]->bytes();
          EXPECT_LT(last[i], (size_t{4} << 20) + (size_t{2} << 20)) << "a share, and what a slice adds";
        }
        const auto allowed = sequences[i]->allowed(made[i]);
        int64_t token = 0;
        do {
          token = static_cast<int64_t>(draw() % 2000);
        } while (!allowed[static_cast<size_t>(token)] ||
                 tokenizer_->token_bytes(static_cast<TokenId>(token)).find('"') != std::string::npos);
        made[i].push_back(token);
      }
      size_t counted = 0;
      for (const auto& form : forms) counted += form->bytes();
      EXPECT_EQ(memory->bytes(), counted);
      if (testing::kSanitized) continue;
      const auto held = static_cast<size_t>(testing::heap_bytes() - before);
      EXPECT_LT(held, counted * 5 / 4 + (size_t{1} << 20));
      EXPECT_GT(held, counted * 3 / 4);
    }
    EXPECT_GT(forgotten, 5);
    for (size_t i = 0; i < 3; ++i) {
      TokenConstraint fresh(std::make_shared<GrammarMasks>(grammar, vocabulary), {2000});
      EXPECT_EQ(sequences[i]->allowed(made[i]), fresh.allowed(made[i])) << "after states were forgotten";
    }
  }
  EXPECT_EQ(memory->bytes(), 0U);
}

}  // namespace
}  // namespace tessera::text
