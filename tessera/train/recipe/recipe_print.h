// A recipe as text, and what the table of keys says as help and documentation.
//
//   fmt::print("{}", to_yaml(recipe));          // tessera train --print-config
//
// Pure, thread-safe.
#pragma once

#include <string>

#include "tessera/train/recipe/recipe.h"

namespace tessera::train {

// Every key with its value and a comment; read_recipe() reads it back to the same recipe.
std::string to_yaml(const Recipe& recipe);
// model.path as the user wrote it, where it was resolved since (model.name).
Recipe with_model_as_named(Recipe recipe);

// The keys as the end of `tessera train --help`.
std::string recipe_help();

// docs/recipe.md, which `tessera train --recipe-docs` prints and a test compares with the committed page.
std::string recipe_docs();

}  // namespace tessera::train
