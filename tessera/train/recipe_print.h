// A recipe as text, and what the table of keys says as help and documentation.
//
//   fmt::print("{}", to_yaml(recipe));          // tessera train --print-config
//
// Pure, thread-safe.
#pragma once

#include <string>

#include "tessera/train/recipe.h"

namespace tessera::train {

// Every key with its value and a comment; read_recipe() reads it back to the same recipe.
std::string to_yaml(const Recipe& recipe);

// The keys as the end of `tessera train --help`.
std::string recipe_help();

// docs/recipe.md, which `tessera train --recipe-docs` prints and a test compares with the committed page.
std::string recipe_docs();

}  // namespace tessera::train
