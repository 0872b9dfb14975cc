// One value of a recipe: reads YAML into the field of a key, with every check that needs only this key, and formats the
// field as text.
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

// Sets the field of `key` in `recipe` from `node`. Error kConfig for a value of the wrong type or range: the message
// names `where`, the key, the value found and the accepted values.
void assign_value(const RecipeKey& key, const YamlNode& node, const std::string& where, Recipe& recipe);

// The value of `key` as YAML, which assign_value() reads back to the same value: 1.0e-08, "0x", [0.9, 0.95], null.
std::string format_value(const RecipeKey& key, const Recipe& recipe);
// `text` as a YAML scalar: a plain word as it is, other text in double quotes.
std::string format_text(std::string_view text);

}  // namespace tessera::train
