// One value of a recipe: from YAML into its field with every check that needs only its key, and back to text.
//
//   Recipe recipe;
//   assign_value(*find_recipe_key("train.steps"), node, "my.yaml:3", recipe);
//
// Pure, thread-safe.
#pragma once

#include <string>
#include <string_view>

#include "tessera/train/recipe/recipe_schema.h"
#include "tessera/train/recipe/yaml_tree.h"

namespace tessera::train {

// Error kConfig starts with `where` and names key, found and wanted value.
void assign_value(const RecipeKey& key, const YamlNode& node, const std::string& where, Recipe& recipe);

// As YAML that assign_value reads back to the same value: 1.0e-08, "0x", [0.9, 0.95], null.
std::string format_value(const RecipeKey& key, const Recipe& recipe);
// A word plain, other text quoted.
std::string format_text(std::string_view text);

}  // namespace tessera::train
