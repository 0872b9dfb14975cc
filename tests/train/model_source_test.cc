// Tests of the name of a run's model: a name on the Hub, a GGUF file or a folder.
#include "tessera/train/run/model_source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/train/recipe/recipe_print.h"

namespace tessera::train {
namespace {

using ::testing::HasSubstr;

Recipe recipe_of(const std::string& name, const std::string& path) {
  Recipe recipe;
  recipe.model.name = name;
  recipe.model.path = path;
  return recipe;
}

TEST(ModelSource, HubModelIsNamedByRepositoryAndRevision) {
  const auto recipe = recipe_of("acme/tiny@v2", "/cache/models--acme--tiny/snapshots/0123abc");
  EXPECT_EQ(public_model_name(recipe).name, "acme/tiny");
  EXPECT_EQ(public_model_name(recipe).revision, "v2");
  EXPECT_EQ(base_model_reference(recipe), "acme/tiny@v2");
  EXPECT_THAT(to_yaml(recipe), HasSubstr("path: \"acme/tiny@v2\""));
  for (const char* name : {"acme/tiny", "acme/tiny@main"}) {
    EXPECT_EQ(public_model_name(recipe_of(name, "/cache/x")).name, "acme/tiny");
    EXPECT_EQ(public_model_name(recipe_of(name, "/cache/x")).revision, "");
  }
}

// The name is not the folder in the user's cache that holds the config and a link to the file.
TEST(ModelSource, GgufFileIsNamedByTheGivenPath) {
  const auto recipe = recipe_of("models/m@q8.gguf", "/cache/tessera/models/1/m-0123");
  EXPECT_EQ(public_model_name(recipe).name, "models/m@q8.gguf");
  EXPECT_EQ(public_model_name(recipe).revision, "");
  EXPECT_EQ(base_model_reference(recipe), (std::filesystem::current_path() / "models/m@q8.gguf").string());
  EXPECT_THAT(to_yaml(recipe), HasSubstr("models/m@q8.gguf"));
}

TEST(ModelSource, FolderIsNamedByItsPath) {
  const auto recipe = recipe_of("", "models/tiny");
  EXPECT_EQ(public_model_name(recipe).name, "models/tiny");
  EXPECT_EQ(base_model_reference(recipe), (std::filesystem::current_path() / "models/tiny").string());
}

}  // namespace
}  // namespace tessera::train
