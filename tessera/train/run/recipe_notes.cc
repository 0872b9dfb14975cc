#include "tessera/train/run/recipe_notes.h"

#include <fmt/ranges.h>

#include "tessera/train/recipe/recipe_schedule.h"
#include "tessera/train/recipe/recipe_schema.h"
#include "tessera/train/recipe/recipe_value.h"
#include "tessera/train/run/run_setup.h"

namespace tessera::train {
namespace {

struct IdleKeys {
  bool idle;           // whether the keys have no effect in this recipe
  std::string reason;  // the setting because of which the keys have no effect
  std::vector<const char*> paths;
};

// Keys that have no effect because of the setting of another key. The run ignores them. (Settings that contradict one
// another are errors of read_recipe().)
std::vector<IdleKeys> idle_keys(const Recipe& recipe) {
  const auto& optimizer = recipe.optimizer;
  const bool validates = !recipe.data.validation.empty() && recipe.train.validate_every > 0;
  return {
      {optimizer.name != "muon",
       "optimizer.name " + optimizer.name,
       {"optimizer.momentum", "optimizer.nesterov", "optimizer.ns_steps", "optimizer.adjust_lr_fn"}},
      {optimizer.name == "sgd", "optimizer.name sgd", {"optimizer.betas", "optimizer.eps"}},
      {recipe.schedule.name == "constant", "schedule.name constant", {"schedule.min_lr_ratio"}},
      {!recipe.lora.path.empty(),
       "model.lora.path, whose folder has its own",
       {"model.lora.rank", "model.lora.alpha", "model.lora.targets", "model.lora.rslora", "model.lora.dora"}},
      {recipe.model.init == "random" && recipe.model.weights != recipe.model.name,
       "model.init random",
       {"model.weights"}},
      {recipe.train.early_stopping_patience == 0,
       "train.early_stopping.patience 0",
       {"train.early_stopping.min_delta"}},
      {recipe.data.validation.empty() && recipe.train.validate_every > 0,
       "no data.validation",
       {"train.validate_every"}},
      {!validates && recipe.checkpoint.keep_best > 0, "no validation", {"checkpoint.keep_best"}},
  };
}

std::string idle_settings(const Recipe& recipe) {
  const Recipe defaults;
  std::vector<std::string> settings;
  for (const auto& [idle, reason, paths] : idle_keys(recipe)) {
    for (const char* path : paths) {
      const auto& key = *find_recipe_key(path);
      const auto value = format_value(key, recipe);
      if (idle && value != format_value(key, defaults)) {
        settings.push_back(fmt::format("{} {} (with {})", path, value, reason));
      }
    }
  }
  return fmt::format("{}", fmt::join(settings, ", "));
}

}  // namespace

std::vector<std::string> recipe_notes(const Recipe& recipe, int64_t train_rows, int64_t steps) {
  std::vector<std::string> notes;
  if (const auto idle = idle_settings(recipe); !idle.empty()) notes.push_back("[train.recipe] without effect: " + idle);
  if (const int64_t longest = longest_warmup(recipe.schedule, steps); recipe.schedule.warmup_steps > longest) {
    notes.push_back(
        fmt::format("[train.schedule] schedule.warmup_steps: {} in a run of {} steps: the warm-up is cut to {}.",
                    recipe.schedule.warmup_steps, steps, longest));
  }
  const int64_t batch = recipe.train.global_batch_size;
  if (recipe.train.steps && train_rows < batch) {
    notes.push_back(
        fmt::format("[train.data] data.train: {} rows, but a step takes {} (train.global_batch_size): a step has "
                    "some rows more than once.",
                    train_rows, batch));
  }
  return notes;
}

}  // namespace tessera::train
