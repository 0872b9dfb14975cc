// Warnings about settings of a recipe that do not do what a reader may expect.
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

// At most one line for each of: settings that differ from their defaults but have no effect in this recipe; a warm-up
// longer than the run; a global batch with more rows than the training data. `steps`: steps of the run.
std::vector<std::string> recipe_notes(const Recipe& recipe, int64_t train_rows, int64_t steps);

}  // namespace tessera::train
