// What a run does otherwise than its recipe may be read.
//
//   for (const auto& note : recipe_notes(recipe, data.train->rows(), steps)) log_warning("{}", note);
//
// Pure, thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/train/recipe/recipe.h"

namespace tessera::train {

// One line each: settings that have another value than by default and no effect beside the others, a warm-up longer
// than the run, a step that takes more rows than there are.
std::vector<std::string> recipe_notes(const Recipe& recipe, int64_t train_rows, int64_t steps);

}  // namespace tessera::train
