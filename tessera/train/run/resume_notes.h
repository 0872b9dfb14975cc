// What is told of a run that goes on from a checkpoint, beside which one it is.
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

// "train.steps 60 (was 40)" for each setting whose value differs from that of a recipe which to_yaml() printed, in the
// order of docs/recipe.md, without those that say where a run lies and what it resumes. None where this version cannot
// read that recipe.
std::vector<std::string> changed_settings(const std::string& saved_yaml, const Recipe& recipe);

// A line about those settings, and one where all steps are done; none of either that says nothing.
std::vector<std::string> resume_notes(const std::string& saved_yaml, const Recipe& recipe, int64_t first_step,
                                      int64_t steps);

}  // namespace tessera::train
