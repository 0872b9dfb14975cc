// Grammars of JSON schemas: texts that they accept, schemas that are refused, and limits.
#include "tessera/text/grammar/json_schema.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>

#include "tessera/base/error.h"
#include "tessera/base/text/json_numbers.h"
#include "tests/text/drawn_schema.h"
#include "tests/text/grammar_draw.h"
#include "tests/text/schema_grammar.h"

namespace tessera::text {
namespace {

using ::testing::HasSubstr;

struct Case {
  std::string schema;
  std::vector<std::string> taken, refused;
};

TEST(JsonSchema, AcceptsExactlyTheSupportedValues) {
  const std::vector<Case> cases = {
      {R"({"type": "string", "minLength": 2, "maxLength": 3})",
       {R"("ab")", R"("abc")", R"("\u00e9é")", R"("\ud83d\ude00x")"},
       {R"("a")", R"("abcd")", R"("\ud83d\ude00")", "12"}},
      {R"({"enum": ["red", 3, null, {"a": [1]}]})", {R"("red")", "3", "null", R"({"a":[1]})"}, {R"("re")", "33"}},
      {R"({"enum": [1, "1", 2.5], "type": ["integer", "null"]})", {"1"}, {R"("1")", "2.5", "null"}},
      {R"({"const": "a", "enum": ["a"], "type": "string"})", {R"("a")"}, {R"("b")"}},
      {R"({"const": 2, "enum": [1, 2, "2"]})", {"2"}, {"1", R"("2")"}},
      {R"({"enum": ["a", "abc", "\u00e9\u00e9", 7], "minLength": 2, "maxLength": 2})",
       {R"("éé")", "7"},
       {R"("a")", R"("abc")"}},
      {R"({"enum": [1, 2, 3, 4.5, 9007199254740993, "a"], "minimum": 2, "exclusiveMaximum": 9007199254740993})",
       {"2", "3", "4.5", R"("a")"},
       {"1", "9007199254740993"}},
      {R"({"enum": [-98765432109876543210, 0.5, 1], "exclusiveMinimum": 0.5, "type": "number"})",
       {"1"},
       {"0.5", "-98765432109876543210"}},
      {R"({"const": "x\"y"})", {R"("x\"y")"}, {R"("xy")"}},
      {R"({"const": null})", {"null"}, {"0", "", "{}"}},
      {R"({"const": null, "type": "null", "title": null})", {"null"}, {"1"}},
      {R"({"const": {"a": null}})", {R"({"a":null})"}, {"{}", "null"}},
      {R"({"type": "object", "properties": {"a": {"const": null}, "b": {"anyOf": [{"const": null}, {"const": 1}]}},
           "required": ["a"]})",
       {R"({"a":null})", R"({"a":null,"b":null})", R"({"a":null,"b":1})"},
       {"{}", R"({"a":1})", R"({"a":null,"b":2})"}},
      {R"({"type": "string", "enum": null, "pattern": null, "maxLength": null, "required": null})", {R"("a")"}, {"1"}},
      {R"({"const": 12345678901234567890123})",
       {"12345678901234567890123"},
       {"1.2345678901234568e+22", "1234567890123"}},
      {R"({"enum": [12345678901234567890123, -98765432109876543210, 18446744073709551615, 1e400], "type": "integer"})",
       {"12345678901234567890123", "-98765432109876543210", "18446744073709551615"},
       {"1e400", "1", "1.2345678901234568e+22"}},
      {R"({"enum": [1e400, 3.0, "a"], "type": "number"})", {"1e400", "3.0"}, {R"("a")", "null"}},
      {R"({"enum": [3.0, 3.5], "type": "integer"})", {"3.0"}, {"3.5"}},
      {R"({"type": "integer", "minimum": 9007199254740993, "maximum": 9007199254740995})",
       {"9007199254740993", "9007199254740995"},
       {"9007199254740992", "9007199254740996"}},
      {R"({"type": "integer", "exclusiveMinimum": 9007199254740993, "exclusiveMaximum": 9007199254740995})",
       {"9007199254740994"},
       {"9007199254740993", "9007199254740995"}},
      {R"({"type": "integer", "minimum": -100000000000000000000, "maximum": 1e25})",
       {"0", "-999999999999999999"},
       {"0.5"}},
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
      {R"({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": false, "minItems": 2})",
       {"[1,2]", "[1, 2]"},
       {"[]", "[1]", "[1,2,", "[1,2,3]", "[1,2 ,"}},
      {R"({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": false, "maxItems": 1})",
       {"[]", "[1]"},
       {"[1,2]", "[1,"}},
      {R"({"type": "array", "items": false})", {"[]", "[ ]"}, {"[1]", "[,"}},
      {R"({"type": "array", "prefixItems": [], "items": false, "minItems": 0})", {"[]"}, {"[1]"}},
      {R"({"type": "array", "prefixItems": [{"const": 1}], "minItems": 3, "items": {"const": 2}})",
       {"[1,2,2]", "[1,2,2,2]"},
       {"[1,2]", "[2,2,2]"}},
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

TEST(JsonSchema, NamesUnsupportedKeywords) {
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
      {R"({"anyOf": [{"type": "null"}], "type": "object"})", "found 'type' together with 'anyOf'"},
      {R"({"allOf": [{}, {}]})", "several are not supported"},
      {R"({"$ref": "other.json#/a"})", "wanted a place in this schema"},
      {R"({"$ref": "#/$defs/none"})", "a place that exists in this schema"},
      {R"({"type": "object", "required": ["a"]})", "the required name 'a'"},
      {R"({"type": "string", "format": "email"})", "wanted date-time"},
      {R"({"type": "array", "prefixItems": [{}], "items": false, "minItems": 2})", "as many as prefixItems"},
      {R"({"enum": ["a"], "type": "null"})", "a value that the type takes"},
      {R"({"const": "a", "enum": ["b", "c"]})", "which the enum lacks"},
      {R"({"const": "a", "minLength": 2})", "a value that the type takes, within the lengths and bounds"},
      {R"({"enum": [1, 2], "minimum": 3})", "within the lengths and bounds"},
      {R"({"enum": [1, 2], "minimum": "3"})", "wanted a number"},
      {R"({"enum": ["a"], "pattern": "a"})", "found 'pattern' together with 'enum'"},
      {R"({"not": {}})", "found 'not'"},
      {"false", "a schema that allows at least one value"},
      {"3", "an object, or true"},
      {R"({"minLength": 1, "propertyNames": {}})", "propertyNames"},
      {R"({"type": "string", "const": null})", "a value that the type takes"},
      {R"({"properties": {"a": null}})", "properties.a: found null"},
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

// A schema is an error if none of its values is finite. An alternative without a finite value is left out.
TEST(JsonSchema, AlternativesWithoutAFiniteValueAreLeftOut) {
  for (const char* schema : {R"({"$ref": "#"})", R"({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]})",
                             R"({"type": "array", "items": {"$ref": "#"}, "minItems": 1})",
                             R"({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]})"}) {
    try {
      schema_grammar(schema);
      ADD_FAILURE() << schema;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kConfig);
      EXPECT_THAT(std::string(error.what()), HasSubstr("no text that ends"));
    }
  }
  const std::string endless = R"("$defs": {"e": {"type": "array", "items": {"$ref": "#/$defs/e"}, "minItems": 1}}})";
  GrammarStates either(schema_grammar(R"({"anyOf": [{"$ref": "#/$defs/e"}, {"const": 1}], )" + endless));
  EXPECT_TRUE(takes(either, "1"));
  EXPECT_EQ(either.next(either.start(), '['), GrammarStates::kDead);
  GrammarStates list(schema_grammar(R"({"type": "array", "items": {"$ref": "#/$defs/e"}, )" + endless));
  EXPECT_TRUE(takes(list, "[]"));
  EXPECT_EQ(list.next(list.next(list.start(), '['), '['), GrammarStates::kDead);
}

// The random schemas have values with null, closed tuples, integers beyond 64 bits, and parts without a finite value.
TEST(JsonSchema, RandomTextsAreValidUnderTheirSchemaAndHaveNoDeadEnds) {
  const auto seed = std::random_device()();
  std::mt19937_64 draw(seed);
  int whole = 0;
  for (int round = 0; round < 400; ++round) {
    const auto schema = drawn_schema(draw);
    GrammarStates states(schema_grammar(dump_json(schema)));
    for (int i = 0; i < 20; ++i) {
      bool stuck = false;
      const auto text = drawn_text(states, draw, &stuck);
      ASSERT_FALSE(stuck) << "seed " << seed << ": " << dump_json(schema);
      if (text.empty()) continue;
      ++whole;
      const auto value = parse_json(text, "text", {.exact_numbers = true});
      ASSERT_TRUE(is_valid(value, schema, schema)) << "seed " << seed << ": " << text << " of " << dump_json(schema);
    }
  }
  EXPECT_GT(whole, 4000);
}

}  // namespace
}  // namespace tessera::text
