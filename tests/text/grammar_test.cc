// Grammars of bytes, and the parts of grammars for JSON texts.
#include "tessera/text/grammar/grammar.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>

#include "tessera/base/error.h"
#include "tessera/base/text/utf8.h"
#include "tests/text/grammar_draw.h"
#include "tests/text/schema_grammar.h"

namespace tessera::text {
namespace {

TEST(Grammar, FollowsAllAlternativesAtOnce) {
  // a^n b^n, or any number of a and then c. Only the end of a text shows which alternative it follows.
  GrammarStates states(grammar_of([](auto& build) {
    const auto even = build.forward();
    build.define(even, build.optional(build.sequence({build.literal("a"), even, build.literal("b")})));
    return build.choice({even, build.sequence({build.zero_or_more(build.literal("a")), build.literal("c")})});
  }));
  for (const char* text : {"", "ab", "aaabbb", "c", "aaac"}) EXPECT_TRUE(takes(states, text)) << text;
  for (const char* text : {"a", "abb", "aab", "ac b", "cb", "ba"}) EXPECT_FALSE(takes(states, text)) << text;
}

TEST(Grammar, CountsRepetitionsWithinBounds) {
  GrammarStates states(grammar_of([](auto& build) { return build.repeat(build.literal("ab"), 2, 1000); }));
  std::string text;
  for (int count = 0; count <= 1001; ++count, text += "ab") EXPECT_EQ(takes(states, text), count >= 2 && count <= 1000);
}

// Repetitions of the empty text must end. A part that begins with itself is an error.
TEST(Grammar, RepetitionsOfTheEmptyTextTerminate) {
  EXPECT_THROW(grammar_of([](auto& build) {
                 const auto self = build.forward();
                 build.define(self, build.choice({self, build.sequence({self})}));
                 return self;
               }),
               Error);
  EXPECT_THROW(GrammarStates(grammar_of([](auto& build) {
                 const auto self = build.forward();
                 build.define(self, build.choice({build.sequence({self, build.literal("a")}), build.literal("b")}));
                 return self;
               })),
               Error);
  GrammarStates empty(grammar_of([](auto& build) { return build.zero_or_more(build.optional(build.literal("a"))); }));
  EXPECT_TRUE(takes(empty, "aaa"));
  GrammarStates wide(grammar_of([](auto& build) { return build.repeat(build.literal("a"), 0, 1 << 30); }));
  EXPECT_TRUE(takes(wide, std::string(5000, 'a')));
  EXPECT_THROW(GrammarStates(grammar_of(
                   [](auto& build) { return build.repeat(build.optional(build.literal("a")), 1 << 20, 1 << 21); })),
               Error);
}

TEST(JsonGrammar, AcceptsExactlyJsonObjects) {
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

TEST(JsonGrammar, RandomTextsAreValidJson) {
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
  using Bound = JsonParts::NumberBound;
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

TEST(JsonGrammar, KeyNoneOfAcceptsAllOtherKeys) {
  const std::vector<std::string> names = {"a", "ab", "b\"c", "\xc3\xa9t\xc3\xa9", ""};
  GrammarStates states(grammar_of([&](auto& build) { return JsonParts(build).key_none_of(names); }));
  for (const auto& name : names) EXPECT_FALSE(takes(states, Json(name).dump())) << name;
  for (const char* text : {"\"abc\"", "\"b\"", "\"c\"", "\"aa\"", "\"a\xc3\xa9\"", "\"x\xc3\xa9t\xc3\xa9\""}) {
    EXPECT_TRUE(takes(states, text)) << text;
  }
  EXPECT_FALSE(takes(states, "\"\\u0061\""));  // "a" as an escape
  // After the first byte of a name's character only a complete character is valid, and other characters may follow it.
  for (const char* text : {"\"\xc3\"", "\"\xc3x\"", "\"\xc3\xa9t\xc3\""}) EXPECT_FALSE(takes(states, text));
  for (const char* text : {"\"\xc3\xa9\"", "\"\xc3\xa9x\"", "\"\xc3\xa9t\xc3\xa9\xc3\xa9\""}) {
    EXPECT_TRUE(takes(states, text)) << text;
  }
}

}  // namespace
}  // namespace tessera::text
