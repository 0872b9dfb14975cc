// Grammars of JSON texts, JSON schemas, and the tokens that they allow.
#include "tessera/text/grammar/grammar.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <random>

#include "tessera/base/error.h"
#include "tessera/base/utf8.h"
#include "tessera/text/grammar/json_schema.h"
#include "tessera/text/grammar/token_constraint.h"
#include "tests/cli/tiny_tokenizer.h"
#include "tests/text/grammar_draw.h"

namespace tessera::text {
namespace {

using ::testing::HasSubstr;
using Part = Grammar::Part;

Grammar grammar_of(const std::function<Part(GrammarBuilder&)>& make) {
  GrammarBuilder build;
  const auto root = make(build);
  return std::move(build).finish(root);
}

Grammar schema_grammar(const std::string& text) {
  const Json document = Json::parse(text);
  return grammar_of([&](auto& build) { return JsonSchema(build, JsonReader(document, "schema")).value(); });
}

TEST(Grammar, FollowsAllReadingsAtOnce) {
  // a^n b^n, or a's and a c: which it is shows at the end.
  GrammarStates states(grammar_of([](auto& build) {
    const auto even = build.forward();
    build.define(even, build.optional(build.sequence({build.literal("a"), even, build.literal("b")})));
    return build.choice({even, build.sequence({build.many(build.literal("a")), build.literal("c")})});
  }));
  for (const char* text : {"", "ab", "aaabbb", "c", "aaac"}) EXPECT_TRUE(takes(states, text)) << text;
  for (const char* text : {"a", "abb", "aab", "ac b", "cb", "ba"}) EXPECT_FALSE(takes(states, text)) << text;
}

TEST(Grammar, CountsRepetitionsWithinBounds) {
  GrammarStates states(grammar_of([](auto& build) { return build.repeat(build.literal("ab"), 2, 1000); }));
  std::string text;
  for (int count = 0; count <= 1001; ++count, text += "ab") EXPECT_EQ(takes(states, text), count >= 2 && count <= 1000);
}

// Parts that take nothing come to an end, and those that begin with themselves to an error.
TEST(Grammar, EndlessReadingsOfNothingEnd) {
  GrammarStates nothing(grammar_of([](auto& build) {
    const auto self = build.forward();
    build.define(self, build.choice({self, build.sequence({self})}));
    return self;
  }));
  EXPECT_TRUE(nothing.ends(nothing.start()));
  EXPECT_FALSE(nothing.accepts(nothing.start()));
  EXPECT_THROW(GrammarStates(grammar_of([](auto& build) {
                 const auto self = build.forward();
                 build.define(self, build.choice({build.sequence({self, build.literal("a")}), build.literal("b")}));
                 return self;
               })),
               Error);
  GrammarStates empty(grammar_of([](auto& build) { return build.many(build.optional(build.literal("a"))); }));
  EXPECT_TRUE(takes(empty, "aaa"));
  GrammarStates wide(grammar_of([](auto& build) { return build.repeat(build.literal("a"), 0, 1 << 30); }));
  EXPECT_TRUE(takes(wide, std::string(5000, 'a')));
  EXPECT_THROW(GrammarStates(grammar_of(
                   [](auto& build) { return build.repeat(build.optional(build.literal("a")), 1 << 20, 1 << 21); })),
               Error);
}

TEST(JsonGrammar, TakesObjectsOfJsonAndNothingElse) {
  GrammarStates states(grammar_of([](auto& build) { return JsonParts(build).any_object(); }));
  for (const char* text :
       {"{}", "{ }", R"({"a":1})", R"({"a": -0.5e+3, "b": [true, false, null, "x\n\u00e9\ud83d\ude00", {}, []]})",
        "{\n  \"a\": \"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\"\n}", R"({"":"\"\\\/"})"}) {
    EXPECT_TRUE(takes(states, text)) << text;
    EXPECT_TRUE(Json::accept(text)) << text;
  }
  for (const char* text : {"",
                           "[]",
                           "1",
                           "{",
                           "{}x",
                           R"({"a"})",
                           R"({"a":01})",
                           R"({"a":1,})",
                           R"({a:1})",
                           R"({"a":.5})",
                           R"({"a":1.})",
                           R"({"a":"\x"})",
                           R"({"a":"\ud83d"})",
                           R"({"a":"\ude00\ud83d"})",
                           "{\"a\":\"\n\"}",
                           "{\"a\":\"\xff\"}",
                           "{\"a\":\"\xed\xa0\x80\"}",
                           "{\"a\":\"\xc0\x80\"}",
                           "{\"a\":\"\xf4\x90\x80\x80\"}",
                           "{   }",
                           R"({"a":1e999})"}) {
    EXPECT_FALSE(takes(states, text)) << text;
  }
}

TEST(JsonGrammar, DrawnTextsAreValidJson) {
  GrammarStates states(grammar_of([](auto& build) { return JsonParts(build).any_value(); }));
  std::mt19937_64 draw(1);
  int whole = 0;
  for (int i = 0; i < 3000; ++i) {
    const auto text = drawn_text(states, draw);
    if (text.empty()) continue;
    ++whole;
    EXPECT_TRUE(is_valid_utf8(text)) << text;
    EXPECT_NO_THROW(parse_json(text, "drawn", {.max_depth = 2000})) << text;
  }
  EXPECT_GT(whole, 2000);
}

TEST(JsonGrammar, IntegersLieBetweenTheirBounds) {
  std::mt19937_64 draw(2);
  for (int round = 0; round < 300; ++round) {
    const int64_t size = int64_t{1} << draw() % 12;
    int64_t least = static_cast<int64_t>(draw() % 4000) - 2000, most = least + static_cast<int64_t>(draw()) % size;
    if (most < least) std::swap(least, most);
    GrammarStates states(grammar_of([&](auto& build) { return JsonParts(build).integer(least, most); }));
    for (int64_t value = least - 30; value <= most + 30; ++value) {
      EXPECT_EQ(takes(states, std::to_string(value)), least <= value && value <= most)
          << value << " of " << least << " to " << most;
    }
    for (const char* text : {"-0", "00", "+1", "", "-", "01"}) EXPECT_FALSE(takes(states, text)) << text;
  }
  GrammarStates all(grammar_of([](auto& build) { return JsonParts(build).integer(); }));
  EXPECT_TRUE(takes(all, "-999999999999999999"));
  EXPECT_FALSE(takes(all, "1000000000000000000"));
}

TEST(JsonGrammar, NumbersLieBetweenTheirBounds) {
  using Bound = JsonParts::Bound;
  for (int64_t least = -13; least <= 12; ++least) {
    for (int64_t most = least; most <= 13; ++most) {
      for (int open = 0; open < 4; ++open) {
        const Bound low{least, open % 2 == 1}, high{most, open / 2 == 1};
        if (least == most && open != 0) continue;
        GrammarStates states(grammar_of([&](auto& build) { return JsonParts(build).number(low, high); }));
        for (int64_t tenths = -140; tenths <= 140; ++tenths) {
          const double value = static_cast<double>(tenths) / 10;
          const auto text = fmt::format("{}", value);
          const bool wanted = (low.open ? value > static_cast<double>(least) : value >= static_cast<double>(least)) &&
                              (high.open ? value < static_cast<double>(most) : value <= static_cast<double>(most));
          EXPECT_EQ(takes(states, text == "-0" ? "0" : text), wanted)
              << text << " of " << least << " to " << most << ", " << open;
        }
      }
    }
  }
  GrammarStates above(grammar_of([](auto& build) { return JsonParts(build).number(Bound{0, true}, std::nullopt); }));
  for (const char* text : {"0.001", "1", "123456789.5"}) EXPECT_TRUE(takes(above, text)) << text;
  for (const char* text : {"0", "0.0", "-1", "1e5", "00.5"}) EXPECT_FALSE(takes(above, text)) << text;
}

TEST(JsonGrammar, KeysOtherThanSomeAreAllOthers) {
  const std::vector<std::string> names = {"a", "ab", "b\"c", "\xc3\xa9t\xc3\xa9", ""};
  GrammarStates states(grammar_of([&](auto& build) { return JsonParts(build).key_other_than(names); }));
  for (const auto& name : names) EXPECT_FALSE(takes(states, Json(name).dump())) << name;
  for (const char* text : {"\"abc\"", "\"b\"", "\"c\"", "\"aa\"", "\"a\xc3\xa9\"", "\"x\xc3\xa9t\xc3\xa9\""}) {
    EXPECT_TRUE(takes(states, text)) << text;
  }
  EXPECT_FALSE(takes(states, "\"\\u0061\""));  // "a" in other words
}

struct Case {
  std::string schema;
  std::vector<std::string> taken, refused;
};

TEST(JsonSchema, TakesWhatItSays) {
  const std::vector<Case> cases = {
      {R"({"type": "string", "minLength": 2, "maxLength": 3})",
       {R"("ab")", R"("abc")", R"("\u00e9é")", R"("\ud83d\ude00x")"},
       {R"("a")", R"("abcd")", R"("\ud83d\ude00")", "12"}},
      {R"({"enum": ["red", 3, null, {"a": [1]}]})", {R"("red")", "3", "null", R"({"a":[1]})"}, {R"("re")", "33"}},
      {R"({"enum": [1, "1", 2.5], "type": ["integer", "null"]})", {"1"}, {R"("1")", "2.5", "null"}},
      {R"({"const": "x\"y"})", {R"("x\"y")"}, {R"("xy")"}},
      {R"({"type": ["number", "boolean"]})", {"-1.5e3", "true"}, {"null", R"("a")"}},
      {R"({"type": "number", "minimum": 0})", {"0", "0.5", "300"}, {"-1", "-0"}},
      {R"({"type": "number", "minimum": 0, "maximum": 1})", {"0", "0.25", "1", "1.000"}, {"1.001", "2", "-0.5"}},
      {R"({"type": "integer", "exclusiveMinimum": 1, "maximum": 12})", {"2", "12"}, {"1", "13", "-2", "2.0"}},
      {R"({"type": "integer", "minimum": 0.5, "exclusiveMaximum": 3})", {"1", "2"}, {"0", "3"}},
      {R"({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3})",
       {"[1]", "[1, 2]", "[1,2,\n 3]"},
       {"[]", "[1,2,3,4]", "[true]", "[1,]"}},
      {R"({"type": "array"})", {"[]", R"([1, "a", [], {}])"}, {"{}"}},
      {R"({"type": "array", "minItems": 2})", {"[1,2]", "[1,2,3,4,5]"}, {"[]", "[1]"}},
      {R"({"type": "array", "maxItems": 0})", {"[]", "[ ]"}, {"[1]"}},
      {R"({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": false})",
       {"[]", "[1]", R"([1,"a"])"},
       {R"(["a"])", R"([1,"a",2])"}},
      {R"({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2, "maxItems": 3})",
       {R"([1,"a"])", R"([1,"a",null])"},
       {"[1]", R"([1,"a",2,3])"}},
      {R"({"type": "object", "properties": {"a": {"type": "integer"}, "b": {}, "c": {"type": "null"}},
           "required": ["b"]})",
       {R"({"b": []})", R"({"a":1,"b":2})", R"({"a":1,"b":2,"c":null})", R"({"b":2,"c":null})"},
       {"{}", R"({"a":1})", R"({"b":2,"a":1})", R"({"b":2,"x":1})", R"({"b":2,})"}},
      {R"({"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}})",
       {"{}", R"({"a":1})", R"({"x":"y"})", R"({"a":1,"b":"c","ab":"d"})"},
       {R"({"a":"s"})", R"({"x":1})", R"({"a":1,"a":"s"})"}},
      {R"({"type": "object", "additionalProperties": false})", {"{}"}, {R"({"a":1})"}},
      {R"({"type": "object"})", {"{}", R"({"a":{"b":[1]}})"}, {"[]"}},
      {R"({"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}}]})",
       {"1", "[]", "[1,[2,[]]]"},
       {R"(["a"])", "{}"}},
      {R"({"$ref": "#/$defs/t~1ree", "$defs": {"t/ree": {"type": "object", "properties": {
           "left": {"anyOf": [{"$ref": "#/$defs/t~1ree"}, {"type": "null"}]}}, "required": ["left"]}}})",
       {R"({"left":null})", R"({"left":{"left":{"left":null}}})"},
       {R"({"left":{}})", "null"}},
      {R"({"type": "string", "format": "date"})",
       {R"("2024-02-29")", R"("2000-02-29")", R"("2024-12-31")", R"("0004-02-29")"},
       {R"("2024-02-30")", R"("2023-02-29")", R"("1900-02-29")", R"("0000-01-01")", R"("2024-13-01")",
        R"("24-01-01")"}},
      {R"({"type": "string", "format": "date-time"})",
       {R"("2024-02-28T23:59:59Z")", R"("2024-01-01T00:00:00.5+02:00")"},
       {R"("2024-02-28")", R"("2024-02-28 00:00:00Z")"}},
      {R"({"type": "string", "format": "uuid"})", {R"("00000000-0000-4000-8000-0123456789ab")"}, {R"("0-0-0-0-0")"}},
      {"true", {"1", "{}", R"("a")"}, {"", "nul"}},
      {R"({"title": "any", "description": "of all"})", {"1", "[]"}, {"x"}},
  };
  for (const auto& each : cases) {
    GrammarStates states(schema_grammar(each.schema));
    for (const auto& text : each.taken) EXPECT_TRUE(takes(states, text)) << each.schema << " refused " << text;
    for (const auto& text : each.refused) EXPECT_FALSE(takes(states, text)) << each.schema << " took " << text;
  }
}

TEST(JsonSchema, NamesWhatItDoesNotKnow) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"({"type": "string", "pattern": "a+"})", "found 'pattern'"},
      {R"({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": true}}})",
       "schema: properties.a: found 'uniqueItems'"},
      {R"({"type": "number", "minimum": 0.5})", "wanted a whole number"},
      {R"({"type": "number", "maximum": 3, "exclusiveMinimum": 3})", "bounds between which a number lies"},
      {R"({"type": "number", "maximum": 3, "exclusiveMaximum": 3})", "both maximum and exclusiveMaximum"},
      {R"({"type": "integer", "minimum": 3, "maximum": 2})", "bounds between which an integer lies"},
      {R"({"type": "integer", "minimum": 1e18})", "bounds between which an integer lies"},
      {R"({"type": "integer", "multipleOf": 2})", "multipleOf"},
      {R"({"type": "text"})", "wanted string, integer"},
      {R"({"type": []})", "at least one type"},
      {R"({"anyOf": [{"type": "null"}], "type": "object"})", "found 'type' beside 'anyOf'"},
      {R"({"allOf": [{}, {}]})", "several at once"},
      {R"({"$ref": "other.json#/a"})", "wanted a place in this schema"},
      {R"({"$ref": "#/$defs/none"})", "a place that is there"},
      {R"({"type": "object", "required": ["a"]})", "'a' required"},
      {R"({"type": "string", "format": "email"})", "wanted date-time"},
      {R"({"type": "array", "prefixItems": [{}], "items": false, "minItems": 2})", "as many as prefixItems"},
      {R"({"enum": ["a"], "type": "null"})", "a value that the type takes"},
      {R"({"not": {}})", "found 'not'"},
      {"false", "a schema that some value fits"},
      {"3", "an object, or true"},
      {R"({"minLength": 1, "propertyNames": {}})", "propertyNames"},
  };
  for (const auto& [schema, text] : cases) {
    try {
      schema_grammar(schema);
      ADD_FAILURE() << schema << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kFormat) << schema;
      EXPECT_THAT(std::string(error.what()), HasSubstr(text)) << schema;
    }
  }
}

TEST(JsonSchema, SizesAreLimited) {
  std::string chain = "{\"$ref\": \"#/$defs/0\", \"$defs\": {";
  for (int i = 0; i < 300; ++i) chain += fmt::format("\"{}\": {{\"$ref\": \"#/$defs/{}\"}}, ", i, i + 1);
  chain += "\"300\": {}}}";
  std::string many = "{\"anyOf\": [{}";
  for (int i = 0; i < 10'000; ++i) many += ",{}";
  const std::string large = "{\"enum\": [\"" + std::string(2 << 20, 'a') + "\"]}";
  const std::string name = "{\"properties\": {\"" + std::string(1000, 'a') + "\": {}}}";
  for (const auto& [schema, text] :
       std::vector<std::pair<std::string, std::string>>{{chain, "at most 200 schemas inside"},
                                                        {many + "]}", "10000 schemas"},
                                                        {large, "1048576 bytes"},
                                                        {name, "512 bytes"}}) {
    try {
      schema_grammar(schema);
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_THAT(std::string(error.what()), HasSubstr(text));
    }
  }
}

// Tokens of one to four bytes of what JSON is made of.
class Masks : public ::testing::Test {
 protected:
  Masks() {
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

TEST_F(Masks, AreThoseOfEachTokenByItself) {
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

TEST_F(Masks, StopTokensComeWhereTheTextIsWholeAndDeadEndsAreSaid) {
  const auto vocabulary = std::make_shared<const SortedVocabulary>(*tokenizer_);
  const auto numbers = std::make_shared<GrammarMasks>(schema_grammar(R"({"type": "integer"})"), vocabulary);
  const auto id = [&](const char* token) { return int64_t{*tokenizer_->token_to_id(token)}; };
  TokenConstraint constraint(numbers, {2000});
  EXPECT_FALSE(constraint.allowed({})[2000]);
  const std::vector<int64_t> made = {id("1")};
  EXPECT_TRUE(constraint.allowed(made)[2000]);
  EXPECT_FALSE(constraint.complete(made));  // 12 is one, too
  const std::vector<int64_t> wrong = {id("1"), id("{")};
  EXPECT_THROW(constraint.complete(wrong), Error);
  TokenConstraint never(std::make_shared<GrammarMasks>(schema_grammar(R"({"const": "xyz"})"), vocabulary), {2000});
  TokenConstraint nothing(std::make_shared<GrammarMasks>(schema_grammar(R"({"$ref": "#"})"), vocabulary), {2000});
  EXPECT_FALSE(nothing.complete({}));
  EXPECT_THROW(nothing.allowed({}), Error);
  const std::vector<int64_t> quote = {id("\"")};
  EXPECT_FALSE(never.complete(quote));
  EXPECT_THROW(never.allowed(quote), Error);  // the vocabulary has no x
}

// A place is found again when the states were let go of meanwhile.
TEST_F(Masks, LetGoOfStatesAndFindTheirPlacesAgain) {
  const auto vocabulary = std::make_shared<const SortedVocabulary>(*tokenizer_);
  const auto masks =
      std::make_shared<GrammarMasks>(schema_grammar(R"({"type": "string", "maxLength": 200000})"), vocabulary);
  const int64_t quote = *tokenizer_->token_to_id("\""), letter = *tokenizer_->token_to_id("a");
  TokenConstraint early(masks, {2000}), late(masks, {2000});
  std::vector<int64_t> begun = {quote, letter}, long_one = {quote};
  const auto before = early.allowed(begun);
  long_one.insert(long_one.end(), 70'000, letter);  // a state each, over a kilobyte
  EXPECT_FALSE(late.complete(long_one));
  EXPECT_EQ(early.allowed(begun), before);
  begun.push_back(quote);
  EXPECT_TRUE(early.complete(begun));
  long_one.push_back(quote);
  EXPECT_TRUE(late.complete(long_one));
}

}  // namespace
}  // namespace tessera::text
