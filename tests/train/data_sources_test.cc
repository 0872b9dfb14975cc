// Tests of `data` in recipes beyond a list of paths: mappings, columns, and that a printed recipe reads back equal.
#include "tessera/train/recipe/data_sources.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "tessera/base/error.h"
#include "tessera/train/recipe/recipe.h"
#include "tessera/train/recipe/recipe_print.h"

namespace tessera::train {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

std::string recipe_with(const std::string& data) { return "model: {path: m}\ndata:\n" + data; }

std::string recipe_error(const std::string& yaml, const std::vector<std::string>& overrides = {}) {
  try {
    parse_recipe(yaml, "r.yaml", overrides);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
    return error.what();
  }
  ADD_FAILURE() << "no error for " << yaml;
  return "";
}

TEST(DataSources, AnItemMayBeAMapping) {
  const auto yaml = recipe_with(R"(
  train:
    - a.jsonl
    - {path: "we b/*.parquet", weight: 2.5, format: text, split: train_sft, columns: {text: content}}
  columns: {messages: dialogue}
  validation: {path: v, split: test}
)");
  const auto check = [](const Recipe& recipe) {
    ASSERT_EQ(recipe.data.train.size(), 2u);
    EXPECT_EQ(parse_source(recipe.data.train[0]).path, "a.jsonl");
    const auto source = parse_source(recipe.data.train[1]);
    EXPECT_EQ(source.path, "we b/*.parquet");
    EXPECT_EQ(source.weight, 2.5);
    EXPECT_EQ(source.format, "text");
    EXPECT_EQ(source.split, "train_sft");
    EXPECT_THAT(source.columns, ElementsAre(Pair("text", "content")));
    EXPECT_THAT(parse_columns(recipe.data.columns), ElementsAre(Pair("messages", "dialogue")));
    ASSERT_EQ(recipe.data.validation.size(), 1u);
    EXPECT_EQ(parse_source(recipe.data.validation[0]).split, "test");
  };
  const auto recipe = parse_recipe(yaml, "r.yaml");
  check(recipe);
  check(parse_recipe(to_yaml(recipe), "again.yaml"));
  const std::vector<std::string> overrides = {"data.train=[b, {path: c, weight: 1}]", "data.columns={text: body}"};
  const auto changed = parse_recipe(yaml, "r.yaml", overrides);
  EXPECT_EQ(parse_source(changed.data.train[1]).path, "c");
  EXPECT_THAT(parse_columns(changed.data.columns), ElementsAre(Pair("text", "body")));
  const std::vector<std::string> pairs = {"data.columns=[text=body, prompt=question]"};
  EXPECT_EQ(parse_columns(parse_recipe(yaml, "r.yaml", pairs).data.columns).size(), 2u);
}

TEST(DataSources, TildeIsExpandedInMappings) {
  ::setenv("HOME", "/home/me", 1);
  const auto recipe = parse_recipe(recipe_with("  train: [{path: ~/x, weight: 1}, '~/y']\n  cache: ~/c\n"), "r.yaml");
  EXPECT_EQ(parse_source(recipe.data.train[0]).path, "/home/me/x");
  EXPECT_EQ(parse_source(recipe.data.train[0]).weight, 1);
  EXPECT_EQ(recipe.data.train[1], "/home/me/y");
  EXPECT_EQ(recipe.data.cache, "/home/me/c");
}

TEST(DataSources, InvalidSourcesAreReported) {
  EXPECT_THAT(recipe_error(recipe_with("  train: [{weight: 1}]\n")), HasSubstr("r.yaml:3: a data source has no path"));
  EXPECT_THAT(recipe_error(recipe_with("  train: [{path: a, wieght: 1}]\n")), HasSubstr("found 'wieght', wanted path"));
  for (const char* weight : {"0", "-1", "nan", "1e400", "x", "[1]"}) {
    EXPECT_THAT(recipe_error(recipe_with(fmt::format("  train: [{{path: a, weight: {}}}]\n", weight))),
                ::testing::AllOf(HasSubstr("weight"), HasSubstr("of a data source")));
  }
  EXPECT_THAT(recipe_error(recipe_with("  train: [{path: a, format: csv}]\n")), HasSubstr("format of a data source"));
  EXPECT_THAT(recipe_error(recipe_with("  train: [[a]]\n")), HasSubstr("list of paths and mappings"));
  EXPECT_THAT(recipe_error(recipe_with("  train: a\n  columns: [text]\n")), HasSubstr("data.columns: found"));
  EXPECT_THAT(recipe_error(recipe_with("  train: a\n  columns: {text: [b]}\n")), HasSubstr("data.columns"));
}

}  // namespace
}  // namespace tessera::train
