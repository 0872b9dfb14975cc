// Tests of the YAML reader of recipes: order, line numbers, aliases, and the refusal of hostile input.
#include "tessera/train/recipe/yaml_tree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"

namespace tessera::train {
namespace {

using ::testing::HasSubstr;

std::string error_of(const std::string& yaml) {
  try {
    parse_yaml(yaml, "x.yaml");
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
    return error.what();
  }
  return "no error";
}

TEST(YamlTree, KeepsOrderLinesAndQuotes) {
  const YamlNode root = parse_yaml("b: 1\na:\n  - '2'\n  - null\n", "x.yaml");
  ASSERT_EQ(root.entries.size(), 2u);
  EXPECT_EQ(root.entries[0].first, "b");
  EXPECT_EQ(root.entries[0].second.line, 1);
  const auto& items = root.entries[1].second.items;
  ASSERT_EQ(items.size(), 2u);
  EXPECT_EQ(items[0].text, "2");
  EXPECT_TRUE(items[0].quoted);
  EXPECT_EQ(items[0].line, 3);
  EXPECT_EQ(items[1].kind, YamlNode::Kind::kNull);
  EXPECT_EQ(parse_yaml("", "x.yaml").kind, YamlNode::Kind::kNull);
  EXPECT_EQ(parse_yaml("# nothing\n", "x.yaml").kind, YamlNode::Kind::kNull);
}

TEST(YamlTree, AliasIsACopyWithTheLineOfItsUse) {
  const YamlNode root = parse_yaml("a: &x [1, 2]\nb: *x\n", "x.yaml");
  ASSERT_EQ(root.entries[1].second.items.size(), 2u);
  EXPECT_EQ(root.entries[1].second.items[1].text, "2");
  EXPECT_EQ(root.entries[1].second.line, 2);
}

TEST(YamlTree, AliasBombIsRefused) {
  std::string bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n";
  for (int i = 1; i < 10; ++i) {
    bomb += fmt::format("a{}: &a{} [", i, i);
    for (int j = 0; j < 10; ++j) bomb += fmt::format("{}*a{}", j ? "," : "", i - 1);
    bomb += "]\n";
  }
  EXPECT_THAT(error_of(bomb), HasSubstr("once its aliases are expanded"));
}

TEST(YamlTree, LongTextAliasedOftenIsRefused) {
  std::string bomb = "a: &a '" + std::string(500000, 'x') + "'\nb: [";
  for (int i = 0; i < 1000; ++i) bomb += "*a,";
  EXPECT_THAT(error_of(bomb + "]\n"), HasSubstr("once its aliases are expanded"));
}

TEST(YamlTree, DeepNestingIsRefusedInEveryStyle) {
  const std::string open(100000, '['), dashes = [] {
    std::string text;
    for (int i = 0; i < 100000; ++i) text += "- ";
    return text;
  }();
  EXPECT_THAT(error_of(open), HasSubstr("nested deeper than 16"));
  EXPECT_THAT(error_of(std::string(100000, '{')), HasSubstr("x.yaml:1"));
  EXPECT_THAT(error_of(dashes), HasSubstr("nested deeper than 16"));
  std::string chain = "a0: &a0 [1]\n";
  for (int i = 1; i < 20; ++i) chain += fmt::format("a{}: &a{} [*a{}]\n", i, i, i - 1);
  EXPECT_THAT(error_of(chain), HasSubstr("nested deeper than 16"));
}

TEST(YamlTree, UnsupportedYamlIsRefused) {
  EXPECT_THAT(error_of("a: 1\na: 2\n"), HasSubstr("x.yaml:2: key 'a' twice"));
  EXPECT_THAT(error_of("a: &x [*x]\n"), HasSubstr("x.yaml:1"));
  EXPECT_THAT(error_of("a: *nowhere\n"), HasSubstr("x.yaml:1: not YAML"));
  EXPECT_THAT(error_of("a: !!python/object/apply:os.system [ls]\n"), HasSubstr("a recipe has no tags"));
  EXPECT_THAT(error_of("[a]: 1\n"), HasSubstr("a key must be a word"));
  EXPECT_THAT(error_of("a: 1\n---\nb: 2\n"), HasSubstr("more than one YAML document"));
  EXPECT_THAT(error_of("a: [1\nb: 2"), HasSubstr("not YAML"));
  EXPECT_THAT(error_of("a: \"x"), HasSubstr("not YAML"));
  EXPECT_THAT(error_of(std::string("a: 1\0b", 6)), HasSubstr("NUL byte"));
  EXPECT_THAT(error_of(std::string(kYamlLimitBytes + 1, ' ')), HasSubstr("at most 1048576"));
}

}  // namespace
}  // namespace tessera::train
