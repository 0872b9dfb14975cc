// A recipe as YAML, and the table of keys as help text and as the page docs/recipe.md.
//
//   fmt::print("{}", to_yaml(recipe));          // tessera train --print-config
//
// Pure, thread-safe.
#pragma once

#include <string>

#include "tessera/train/recipe/recipe.h"

namespace tessera::train {

// The recipe as YAML: every key with its value and a comment. read_recipe() reads this text back to the same recipe.
std::string to_yaml(const Recipe& recipe);
// Returns the recipe with the model name that the user gave (ModelSection::name) as model.path. Without such a name the
// recipe is returned unchanged.
Recipe with_model_as_named(Recipe recipe);

// The last part of `tessera train --help`: all keys.
std::string recipe_help();

// The text of docs/recipe.md. `tessera train --recipe-docs` prints it; a test compares it with the committed page.
std::string recipe_docs();

}  // namespace tessera::train
