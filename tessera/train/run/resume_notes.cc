#include "tessera/train/run/resume_notes.h"

#include <fmt/ranges.h>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/train/recipe/recipe_print.h"
#include "tessera/train/recipe/recipe_schema.h"
#include "tessera/train/recipe/recipe_value.h"

namespace tessera::train {

std::vector<std::string> changed_settings(const std::string& saved_yaml, const Recipe& recipe) {
  // The saved recipe is parsed like a recipe of a user, with all checks. Parsing fails if this version has other keys
  // or ranges than the version that saved the recipe. Then no settings are compared, and the run resumes all the same.
  std::vector<std::string> changes;
  try {
    const Recipe saved = parse_recipe(saved_yaml, "the checkpoint's recipe"), now = with_model_as_named(recipe);
    for (const auto& key : recipe_keys()) {
      const auto path = key.path();
      if (path == "checkpoint.dir" || path == "checkpoint.resume") continue;
      const auto before = format_value(key, saved), after = format_value(key, now);
      if (before != after) changes.push_back(fmt::format("{} {} (was {})", path, after, before));
    }
  } catch (const Error& error) {
    log_debug("[train.resume] the checkpoint's recipe is not compared: {}", error.what());
  }
  return changes;
}

std::vector<std::string> resume_notes(const std::string& saved_yaml, const Recipe& recipe, int64_t first_step,
                                      int64_t steps) {
  std::vector<std::string> notes;
  if (const auto changes = changed_settings(saved_yaml, recipe); !changes.empty()) {
    notes.push_back(fmt::format("[train.resume] settings changed since: {}", fmt::join(changes, ", ")));
  }
  if (first_step >= steps) {
    const auto duration_setting = recipe.train.epochs ? fmt::format("train.epochs {}", *recipe.train.epochs)
                                                      : fmt::format("train.steps {}", steps);
    notes.push_back(fmt::format("[train.resume] nothing is left to train: {} steps are done, and {} asks for no more.",
                                first_step, duration_setting));
  }
  return notes;
}

}  // namespace tessera::train
