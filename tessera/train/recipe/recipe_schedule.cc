#include "tessera/train/recipe/recipe_schedule.h"

#include <algorithm>
#include <cmath>

namespace tessera::train {

int64_t longest_warmup(const ScheduleSection& schedule, int64_t steps) {
  // The decay of wsd comes after the warm-up and constant part; other schedules decay over all steps after the warm-up.
  const auto share = std::llround(schedule.decay_ratio * static_cast<double>(steps));
  const int64_t decay = schedule.name == "wsd" ? schedule.decay_steps.value_or(share) : 0;
  return std::max<int64_t>(steps - decay, 0);
}

optim::Schedule build_schedule(const Recipe& recipe, int64_t steps) {
  const int64_t warmup = recipe.schedule.warmup_steps;
  return optim::Schedule(
      {.name = recipe.schedule.name,
       .lr = recipe.optimizer.lr,
       .warmup_steps = recipe.train.steps ? warmup : std::min(warmup, longest_warmup(recipe.schedule, steps)),
       .total_steps = steps,
       .min_lr_ratio = recipe.schedule.min_lr_ratio,
       .decay_steps = recipe.schedule.decay_steps,
       .decay_ratio = recipe.schedule.decay_ratio,
       .decay_type = recipe.schedule.decay_type});
}

}  // namespace tessera::train
