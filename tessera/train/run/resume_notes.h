// Log lines about a run that resumes from a checkpoint.
//
//   for (const auto& note : resume_notes(checkpoint.extra().value("recipe", ""), recipe, first_step, steps)) ...
//
// Pure, thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/train/recipe/recipe.h"

namespace tessera::train {

// "train.steps 60 (was 40)" for each setting that differs between `recipe` and `saved_yaml`, a recipe that to_yaml()
// printed. The order is that of docs/recipe.md; checkpoint.dir and checkpoint.resume are left out. Empty if this
// version cannot read the saved recipe.
std::vector<std::string> changed_settings(const std::string& saved_yaml, const Recipe& recipe);

// At most two lines: one that lists the changed settings, if there are any, and one if all steps are already done.
std::vector<std::string> resume_notes(const std::string& saved_yaml, const Recipe& recipe, int64_t first_step,
                                      int64_t steps);

}  // namespace tessera::train
