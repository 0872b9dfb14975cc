// parse_json() against nlohmann's parser, its limits and error messages, numbers with exact digits, and JsonReader.
#include "tessera/base/text/json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>

#include "tessera/base/text/json_numbers.h"
#include "tests/support/heap_bytes.h"
#include "tests/support/process.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

template <class Body>
std::string message_of(Body body, ErrorKind kind = ErrorKind::kFormat) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    EXPECT_THAT(error.what(), Not(HasSubstr("\n")));
    return error.what();
  }
  return "no error";
}

std::string refused(const std::string& text, const JsonLimits& limits = {}) {
  return message_of([&] { parse_json(text, "[t] f", limits); });
}

TEST(ParseJson, MatchesNlohmann) {
  for (const char* text :
       {"null", "7", "-7", "1.5", "\"a\\u00e9\"", "[]", "{}", "[1,[2,{\"a\":[true,false,null]}],\"x\"]",
        "{\"b\":1,\"a\":{\"d\":[{}],\"c\":\"\"},\"e\":18446744073709551615}"}) {
    EXPECT_EQ(parse_json(text, "t"), Json::parse(text)) << text;
    EXPECT_EQ(parse_json(text, "t").dump(), Json::parse(text).dump()) << text;
  }
}

TEST(ParseJson, DuplicateKeysKeepTheLastValueAtTheFirstPosition) {
  EXPECT_EQ(parse_json(R"({"a":1,"b":2,"a":[3],"c":4,"b":5,"a":6})", "t").dump(), R"({"a":6,"b":5,"c":4})");
}

TEST(ParseJson, LimitsDepthBytesAndKeys) {
  EXPECT_THAT(refused(std::string(1'000'000, '[')), HasSubstr("[t] f: the JSON is nested deeper than 64 levels"));
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += "{\"a\":";
  EXPECT_THAT(refused(objects), HasSubstr("nested deeper"));
  EXPECT_THAT(refused("[[1]]", {.max_depth = 1}), HasSubstr("nested deeper than 1 levels"));
  EXPECT_EQ(parse_json("[[1],[2]]", "t", {.max_depth = 2}).size(), 2u);
  EXPECT_THAT(refused("[1, 2, 3]", {.max_bytes = 8}), HasSubstr("9 bytes of JSON, at most 8"));
  EXPECT_THAT(refused(R"({"a":{"b":1},"c":1})", {.max_keys = 2}), HasSubstr("more than 2 keys"));
}

TEST(FindJsonSyntaxError, ReportsThePositionOfTheError) {
  EXPECT_FALSE(find_json_syntax_error(R"({"a": [1, 2, {}]})"));
  const auto syntax_error = find_json_syntax_error(R"({"a": 1 "b": 2})");
  ASSERT_TRUE(syntax_error);
  EXPECT_EQ(syntax_error->byte, 11u);  // the end of the token "b"
  EXPECT_THAT(syntax_error->reason, ::testing::StartsWith("syntax error"));
  EXPECT_TRUE(find_json_syntax_error(""));
  EXPECT_FALSE(find_json_syntax_error(std::string(1000, '[') + std::string(1000, ']')));
}

// Two files have a parser of their own with limits of their own, because they store a part of the document elsewhere.
TEST(ParseJson, IsTheOnlyJsonParserUsedInTheLibrary) {
  namespace fs = std::filesystem;
  const auto root = testing::source_folder() / "tessera";
  std::set<std::string> others;
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    const auto extension = entry.path().extension();
    if ((extension != ".cc" && extension != ".h") || entry.path() == root / "base" / "text" / "json.cc") continue;
    std::ifstream file(entry.path());
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    for (const char* other : {"json::parse(", "Json::parse(", "json::accept(", "json::from_"}) {
      EXPECT_EQ(text.find(other), text.npos) << entry.path() << ": " << other;
    }
    if (text.find("sax_parse(") != text.npos) others.insert(fs::relative(entry.path(), root).string());
  }
  EXPECT_THAT(others,
              ::testing::ElementsAre("formats/safetensors/safetensors_header.cc", "text/tokenizer/tokenizer_file.cc"));
}

// With quadratic insertion this test would take minutes and reach ctest's time limit.
TEST(ParseJson, ObjectsOfManyKeysAreReadInLinearTime) {
  constexpr int kKeys = 400'000;
  std::string text = "{";
  for (int i = 0; i < kKeys; ++i) text += fmt::format("{}\"key {}\":{}", i ? "," : "", i, i);
  const Json json = parse_json(text + "}", "t");
  EXPECT_EQ(json.size(), static_cast<size_t>(kKeys));
  EXPECT_EQ(json.get_ref<const Json::object_t&>().back().second, kKeys - 1);
}

TEST(ParseJson, SyntaxErrorsNameTheByteInOneCleanLine) {
  EXPECT_THAT(refused("{\"a\": oops}"), HasSubstr("[t] f: byte 7: no valid JSON: syntax error"));
  for (const char* text : {"", " ", "{", "[1,", "{\"a\"}", "1 2", "\"\xff\"", "1e999", "[1]]", "nul", "{1:2}"}) {
    EXPECT_THAT(refused(text), HasSubstr("no valid JSON")) << text;
  }
  const std::string long_token = refused("\"" + std::string(1 << 20, 'a') + "\x1b");
  EXPECT_LT(long_token.size(), 1000u);
  EXPECT_THAT(long_token, Not(HasSubstr("\x1b")));
  EXPECT_THAT(message_of([] { parse_json_object("[1]", "[t] f"); }),
              HasSubstr("is not a JSON object, but an array of 1"));
}

TEST(ParseJson, NumbersBeyond64BitsKeepTheirDigits) {
  const JsonLimits exact{.exact_numbers = true};
  const std::string text =
      R"({"a":12345678901234567890123,"b":[-99999999999999999999,1e400,-1E+999,"1e400 \\\" 7"],"c":{"1e400":0.5},)"
      R"("d":18446744073709551615,"e":-9223372036854775808,"f":1e22})";
  const Json json = parse_json(text, "t", exact);
  EXPECT_EQ(exact_digits(json["a"]), "12345678901234567890123");
  EXPECT_EQ(exact_digits(json["b"][1]), "1e400");
  EXPECT_EQ(exact_digits(json["d"]), std::nullopt) << "64 bits hold it";
  EXPECT_EQ(json["c"]["1e400"], 0.5);
  EXPECT_EQ(dump_json(json), R"({"a":12345678901234567890123,"b":[-99999999999999999999,1e400,-1E+999,"1e400 \\\" 7"],)"
                             R"("c":{"1e400":0.5},"d":18446744073709551615,"e":-9223372036854775808,"f":1e+22})");
  EXPECT_EQ(parse_json(dump_json(json), "t", exact), json);
  EXPECT_FALSE(json["a"].is_number() || json["a"].is_string()) << "no function may take it for another value";
  EXPECT_EQ(describe(json["a"]), "12345678901234567890123");
  const std::string long_one(5000, '7');
  EXPECT_EQ(dump_json(parse_json("[0, " + long_one + "]", "t", exact)), "[0," + long_one + "]");
  EXPECT_LT(describe(parse_json(long_one, "t", exact)).size(), 100u);
  // Without exact_numbers an integer is rounded and an overflow is an error. Syntax errors name the byte in both modes.
  EXPECT_EQ(parse_json("12345678901234567890123", "t"), 12345678901234567890123.0);
  EXPECT_THAT(refused("[1e400]"), HasSubstr("number overflow"));
  EXPECT_THAT(refused("[1e400, 2, oops]", exact), HasSubstr("byte 12: no valid JSON: syntax error"));
  for (const char* wrong : {"[1e400,]", "1e400e", "[1e400", "{\"a\": 01e400}", "-", "[1e400 1]"}) {
    EXPECT_THAT(refused(wrong, exact), HasSubstr("no valid JSON")) << wrong;
  }
}

TEST(JsonReader, NumbersBeyond64BitsAreNoIntegersAndReadAsTheNearestDouble) {
  const Json json = parse_json(R"({"n":12345678901234567890123,"x":1e400})", "t", {.exact_numbers = true});
  const JsonReader top(json, "t");
  EXPECT_EQ(top.number("n", 0, -1e30, 1e30), 12345678901234567890123.0);
  EXPECT_THAT(message_of([&] { top.number("x", 0, -1e30, 1e30); }), HasSubstr("x: found 1e400, wanted a number"));
  EXPECT_THAT(message_of([&] { top.integer("n", 0, 0, INT64_MAX); }), HasSubstr("n: found 12345678901234567890123"));
  EXPECT_THAT(message_of([&] { top.string("n"); }), HasSubstr("wanted a string"));
}

// The readers of the members store no copies of the path of a deeply nested value.
TEST(JsonReader, ReadersOfManyDeeplyNestedMembersUseLittleMemory) {
  Json inner = Json::object();
  auto& members = inner.get_ref<Json::object_t&>();
  for (int i = 0; i < 1000; ++i) members.push_back({std::to_string(i), 1});
  for (int i = 0; i < 60; ++i) inner = Json{{std::string(60, 'a'), std::move(inner)}};
  JsonReader reader(inner, "t");
  for (int i = 0; i < 60; ++i) reader = reader.at(std::string(60, 'a'));
  const int64_t before = testing::heap_bytes();
  const auto all = reader.members();
  EXPECT_LT(testing::heap_bytes() - before, 1000 * 400) << "a path of 60 keys has 3,660 bytes";
  EXPECT_EQ(all.back().second.name().size(), 3 + 60 * 61 + 3u);
  EXPECT_EQ(all[1].second.name().substr(0, 6), "t: aaa");
}

TEST(JsonReader, ReadsMembersAndTreatsNullAsAbsent) {
  const Json json =
      parse_json(R"({"n":3,"x":0.5,"s":"t","b":true,"null":null,"list":[1,2],"o":{"k":[{"deep":"yes"}]}})", "t");
  const JsonReader top(json, "t");
  EXPECT_EQ(top.integer("n", std::nullopt, 0, 9), 3);
  EXPECT_EQ(top.integer("null", 5, 0, 9), 5);
  EXPECT_EQ(top.number("x", 1.0, 0, 1), 0.5);
  EXPECT_EQ(top.string("s"), "t");
  EXPECT_EQ(top.string("absent", "d"), "d");
  EXPECT_TRUE(top.boolean("b"));
  EXPECT_FALSE(top.has("null"));
  EXPECT_TRUE(top.at("null").is_null());
  EXPECT_TRUE(top.member("null")->is_null());
  EXPECT_FALSE(top.member("absent") || top.find("null"));
  EXPECT_EQ(top.integers("list", 0, 9), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(top.integers("n", 0, 9), std::vector<int64_t>{3});
  EXPECT_TRUE(top.integers("null", 0, 9).empty());
  EXPECT_EQ(top.at("o").at("k").items().at(0).string("deep"), "yes");
  EXPECT_EQ(top.members().size(), 7u);
}

TEST(JsonReader, ErrorsNamePathFoundAndExpectedValue) {
  const Json json =
      parse_json(R"({"n":-3,"big":18446744073709551615,"x":1.5,"s":"\u001b[31m","o":{"k":[1,"two"]}})", "t");
  const JsonReader top(json, "[t] f", ErrorKind::kConfig);
  const auto says = [&](auto read) { return message_of([&] { read(); }, ErrorKind::kConfig); };
  EXPECT_EQ(says([&] { top.integer("n", 1, 0, 9); }), "[t] f: n: found -3, wanted an integer from 0 to 9");
  EXPECT_THAT(says([&] { top.integer("big", 1, 0, INT64_MAX); }), HasSubstr("found 18446744073709551615"));
  EXPECT_THAT(says([&] { top.integer("x", 1, 0, 9); }), HasSubstr("x: found 1.5"));
  EXPECT_THAT(says([&] { top.number("x", 1.0, 0, 1); }), HasSubstr("found 1.5, wanted a number from 0 to 1"));
  EXPECT_THAT(says([&] { top.integer("s", 1, 0, 9); }), HasSubstr(R"(found "\x1b[31m", wanted an integer)"));
  EXPECT_THAT(says([&] { top.string("o"); }), HasSubstr("o: found an object of 1 keys, wanted a string"));
  EXPECT_THAT(says([&] { top.at("o").integers("k", 0, 9); }), HasSubstr("o.k[1]: found \"two\", wanted an integer"));
  EXPECT_EQ(says([&] { top.at("o").string("gone"); }), "[t] f: o.gone is missing");
  EXPECT_EQ(says([&] { top.at("gone"); }), "[t] f: gone is missing");
  EXPECT_THAT(says([&] { top.at("n").has("k"); }), HasSubstr("n: found -3, wanted an object"));
}

}  // namespace
}  // namespace tessera
